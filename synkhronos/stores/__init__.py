"""Stores: arrays that every rank can reach through a small handle.

``base`` is the interface, ``naive`` its specification, and ``handle`` what ranks send to each other.
``shared`` keeps arrays in the shared memory of one machine, which ``memory`` allocates; ``files`` maps
those of ``numpy.memmap`` from their files.

May import: ``arithmetic``, ``host``.
"""
