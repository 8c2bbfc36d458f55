"""Transports: how ranks start, end, synchronize and send bytes to each other.

``base`` is the interface; ``naive``, with threads as ranks, is its specification. ``local`` forks
processes on one machine. Its ``children`` are the processes; ``milestones`` say how far each rank is in
a command, and with ``watchful`` a rank notices when it need not wait any longer. It sends with ``box``,
signals with ``semaphore`` and waits with ``waiting``. ``fork_locks`` holds locks while a worker is
forked. ``liveness`` and ``limits`` explain why a process died or could not be started.

May import: ``arithmetic``, ``host``, ``stores``, ``comms``.
"""
