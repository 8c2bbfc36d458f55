"""Stores: arrays that every rank can access through a small handle.

``base`` is the interface; ``naive`` is its specification. ``handle`` defines the handles that ranks send
to each other. ``shared`` keeps arrays in the shared memory of one machine, which ``memory`` allocates.
``machines`` sends arrays from one machine to another, those that ``needs`` name.
``files`` maps the files of ``numpy.memmap``. ``commons`` has the arrays and locks that belong to no
rank; those of ``joint`` can be joined by a process that was not forked.

May import: ``arithmetic``, ``host``.
"""
