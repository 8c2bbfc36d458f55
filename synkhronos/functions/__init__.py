"""Functions: building, replicating and calling them.

``build`` has ``function()``, whose arguments ``signature`` checks. ``function`` has the class
`Function`; ``replica`` is a rank's part of it, and ``copies`` makes copies. ``arguments`` checks the
arguments of a call before its start barrier. ``call`` is each rank's part of a call: it takes its
``rows`` of the arguments, possibly in slices, or of the ``window`` of rows that an index selects;
``hardcoded_rows`` has the errors of graphs that need another number of rows. ``peers`` are the other
ranks in the collectives of a graph. ``outputs`` are sent to the finish barrier, and reduced afterwards
unless the communicator has reduced them. ``replicate`` sends functions to the workers. ``compiling``
shows that a function is being compiled, and notebooks show its ``description``.

``analysis`` finds in graphs how results depend on rows, and refuses loops along them.
``replica_tracker`` knows which replicas of shared variables are meant to be equal, and ``changes`` sends
what the script changes on the master to the other ranks, and seeds their random streams. The folder
``comparing`` compares replicas, and results with the serial ones.

``steps`` is for extensions, whose steps are several calls, and ``stay`` for extensions whose workers
stay in a function. ``on_step`` tells a function of the script of each step.
"""
