"""Transports: how ranks start, end and meet, and how bytes travel between them.

``base`` is the interface, ``naive`` its specification, with threads as ranks. ``local`` forks processes
on one machine; ``box``, ``semaphore`` and ``waiting`` are what it sends, signals and waits with,
``liveness`` and ``limits`` tell why a process died or could not be started.

May import: ``host``, ``stores``, ``comms``.
"""
