"""Functions: building, replicating and calling them.

``build`` has ``function()``, whose arguments ``signature`` checks; ``wrappers`` has `In` and `Out`, in
which variables can be given with options. ``function`` has the class `Function`, a part of it in
``inputs``; ``replica`` is what a rank has of one, and ``specification`` what other ranks need to know
about one. ``arguments`` checks the arguments of a call before its start barrier, except for what has not
changed since the ``last_call``. ``call`` is each rank's part of a call, ``split`` into its ``columns``
of the arguments and of the ``window`` of rows that an index selects, and possibly in ``slices``;
``fixed`` has the errors of graphs that need another number of rows. ``peers`` are the other ranks in the
collectives of a graph, which use the memory of ``stages``. Results are ``packed`` for the finish
barrier, and ``outputs`` reduces them afterwards, unless the communicator has ``reduced`` them.
``replicate`` sends functions to the workers, and ``random`` seeds their random streams. ``recurrence``
refuses loops that would begin anew on every rank. ``copyable`` has what copies and pickles of functions
do, of which ``parts`` are made. ``compiling`` shows that a function is being compiled, and
``description`` is what notebooks show of one.

``calls`` are run without effects: on one rank alone, by ``serial`` commands, and on all, by a ``trial``
on every rank, which updates ``copies`` of shared variables. ``compare`` compares the results, and
``reasons`` finds why they differ: in ``check``, and for first calls in ``verification``.
``agreement`` keeps track of the replicas of shared variables that are meant to be equal, with what
``analysis`` reads from graphs; in the first calls of a function, ``watch`` warns if they are not equal,
and in every call ``audit`` raises an error if they are not.

``steps`` is for extensions, whose steps are several calls.

May import: ``arithmetic``, ``comms``, ``host``, ``stores``, ``engines``, ``world``, ``arrays``.
"""
