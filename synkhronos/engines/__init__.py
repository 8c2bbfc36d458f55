"""Engines: graph compilers and their array types.

``base`` is the interface; ``naive``, in NumPy, is its specification. ``theano_cpu`` and ``theano_gpu``
run Theano on NumPy arrays and on the arrays of a GPU; their common code is in ``theano_engine``,
``theano_modules``, ``theano_pickles`` and ``theano_shared``. ``theano_dependence`` reads from a graph
what its results depend on, and ``theano_rows`` how they depend on the number of rows, with
``theano_degrees`` and ``theano_shapes``. ``theano_windows`` divides the rows that an index selects.
``theano_collectives`` has collectives as operations in graphs, ``theano_gpu_collectives`` those of
arrays on a GPU, and ``theano_order`` gives them their order. ``theano_kernels`` and ``cuda_context``
work around defects in the GPU code of Theano and libgpuarray. ``theano_scan`` and ``theano_downsample``
are loaded by the names of modules of Theano, see ``host/imports``. Engines know nothing about processes.

May import: ``arithmetic``, ``host``.
"""
