"""Functions: making, replicating and calling them.

``function`` is the public class. ``signature`` checks the arguments of ``function()``; ``arguments``
those of a call, before its start barrier; ``call`` is what each rank does; ``outputs`` reduces the
results after the finish barrier. ``replicate`` brings functions to the ranks, ``random`` seeds their
random streams.

May import: ``arithmetic``, ``stores``, ``engines``, ``world``, ``arrays``.
"""
