"""Engines: graph compilers with their array types.

``base`` is the interface, ``naive`` its specification, in NumPy. ``theano_cpu`` and ``theano_gpu`` are
Theano on NumPy arrays and on those of a GPU; what they have in common is in ``theano_engine``,
``theano_modules`` and ``theano_pickles``. ``theano_kernels`` and ``cuda_context`` work around defects of
Theano's and libgpuarray's GPU code. Engines know nothing of processes.

May import: ``arithmetic``, ``host``.
"""
