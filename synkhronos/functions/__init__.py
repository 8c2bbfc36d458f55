"""Functions: building, replicating and calling them.

``build`` has ``function()``, whose arguments ``signature`` checks; it divides the rows that an index
selects. ``function`` has the class `Function`; ``replica`` is a rank's part of it, with the errors of
graphs that need another number of rows. ``copies`` compiles, and makes copies. ``arguments`` checks the
arguments of a call before its start barrier. ``call`` is the call itself: each rank takes its rows of
the arguments, possibly in slices, and sends its outputs, which the master reduces afterwards unless the
communicator has reduced them. ``peers`` are the other ranks in the collectives of a graph.
``replicate`` sends functions to the workers.

``analysis`` finds in graphs how results depend on rows, and refuses loops along them.
``replica_tracker`` knows which replicas of shared variables are meant to be equal, compares them, and
sends what the script changes on the master to the other ranks; it seeds their random streams. The
folder ``comparing`` warns of replicas that differ, and compares results with the serial ones.

``steps`` is for extensions, whose steps are several calls, or whose workers stay in a function.
``on_step`` tells a function of the script of each step.
"""
