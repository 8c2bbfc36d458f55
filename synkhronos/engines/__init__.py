"""Engines: graph compilers and their array types.

``base`` is the interface; ``naive``, in NumPy, is its specification; ``peers`` are the other ranks,
for collectives in graphs. ``cpu`` provides the engine of the compiler that ``host/compiler`` has
chosen. ``graphs`` is the common code of Theano and PyTensor, with ``pickles`` and ``containers``;
``names`` provides their names, and ``apart`` an operation that keeps others from being fused.
``dependence`` reads from a graph what its results depend on, and ``rows``, with ``degrees`` and
``shapes``, how they depend on the number of rows; ``seeds`` are where gradients begin, and
``suspects`` finds what may make results differ from those of one process. ``axes`` follows the axis of
the rows further than ``rows``, for ``windows``, which divides the rows that an index selects, and
``recurrence``, which finds loops along them. ``equal_axes`` finds which ``extents`` are equal, and
``fixed_rows`` replaces numbers of rows that a script gives as constants. ``swaps``
checks which shared variables a copy of a function replaces, and ``remarks`` are words of messages.
``timing`` is how long the operations of a function take.

``pytensor_engine`` runs PyTensor on NumPy arrays, and ``pytensor_jax`` on JAX arrays. ``theano_cpu``
and ``theano_gpu`` run Theano on NumPy arrays and on the arrays of a GPU; their common code is in
``theano_engine`` and ``theano_modules``. The folder ``kernels`` has faster operations for the CPU.
``theano_direct`` calls a compiled function in less time.
``collectives`` are operations in graphs of either compiler, derived from the classes in ``operation``;
``buckets`` is one that does not wait for other ranks, and ``order`` gives them their order.
``theano_gpu_collectives`` replaces them for arrays on a GPU. ``theano_kernels`` and ``cuda_context``
work around defects in the GPU code of Theano and libgpuarray. ``theano_scan``, ``theano_downsample``,
``theano_inc_code`` and ``theano_numpy`` are loaded under the names of Theano modules; see
``host/repairs``. Engines know nothing about processes.

May import: ``arithmetic``, ``host``.
"""
