"""Functions: building, replicating and calling them.

``function`` has the public class. ``signature`` checks the arguments of ``function()``. ``arguments``
checks the arguments of a call, before its start barrier; ``call`` is the part of each rank; ``outputs``
reduces the results after the finish barrier. ``replicate`` sends functions to the workers, and
``random`` seeds their random streams.

May import: ``arithmetic``, ``host``, ``stores``, ``engines``, ``world``, ``arrays``.
"""
