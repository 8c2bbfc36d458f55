"""Engines: graph compilers and their array types.

``base`` is the interface; ``naive``, in NumPy, is its specification. ``cpu`` provides the engine of the
compiler that ``host/compiler`` has chosen. The folders ``theano`` and ``pytensor`` have the engines of
the compilers. What these have in common is in ``graph_engine``, with ``pickles`` and ``containers``;
``names`` provides the names of either compiler, and ``apart`` an operation that keeps others from being
fused. The folder ``analysis`` reads from graphs how results depend on rows. ``timing`` is how long the
operations of a function take.

``collectives`` are operations in graphs of either compiler, derived from the classes in ``operation``;
``peers`` are the other ranks, as these see them. ``bucketed_vector`` is a vector whose parts are reduced
while others are computed, and ``collective_order`` gives collectives their order.

``swap_argument`` checks which shared variables a copy of a function replaces, and ``remarks`` are words
of messages. Engines know nothing about processes.

May import: ``arithmetic``, ``host``.
"""
