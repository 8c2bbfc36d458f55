"""Engines: graph compilers and their array types.

``base`` is the interface; ``naive``, in NumPy, is its specification. ``theano_cpu`` and ``theano_gpu``
run Theano on NumPy arrays and on the arrays of a GPU; their common code is in ``theano_engine``,
``theano_modules`` and ``theano_pickles``. ``theano_kernels`` and ``cuda_context`` work around defects in
the GPU code of Theano and libgpuarray. Engines know nothing about processes.

May import: ``arithmetic``, ``host``.
"""
