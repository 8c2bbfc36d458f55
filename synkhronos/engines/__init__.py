"""Engines: graph compilers and their array types.

``base`` is the interface, which ``tests/specifications`` implements in NumPy. ``cpu`` provides the
engine of the compiler that ``host/compiler`` has chosen. The folders ``theano`` and ``pytensor`` have
the engines of the compilers. Their common code is in ``graph_engine``, with ``pickles``; ``names``
provides the names of either compiler. The folder ``analysis`` reads from graphs how results depend on
rows.

``collectives`` are operations in graphs of either compiler, in one order on all ranks. Engines know
nothing about processes.
"""
