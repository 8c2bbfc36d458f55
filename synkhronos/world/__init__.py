"""The world: the ranks of one ``fork()``, the commands that they run, and failures.

``here`` is a rank's own state and what a command is; ``world`` runs commands, between a start and a
finish barrier; ``registry`` numbers functions and shared variables. ``launch`` begins and ends a world,
``worker`` is the loop of a worker, ``devices`` and ``threads`` give each rank its device and its threads
of BLAS, ``restart`` replaces the workers, ``fuse`` makes one command of several calls.

May import: ``host``, ``stores``, ``comms``, ``transports``, ``engines``.
"""
