"""Transports: how ranks start, end, synchronize and send bytes to each other.

``base`` is the interface, which ``tests/specifications`` implements with threads as ranks. ``local``
forks processes on one machine. Its ``children`` are the processes, of which it says whether they live
and why they died. It sends with ``mailbox``. ``waiting`` has semaphores, says how long a rank polls, and
how far each rank is in a command. With many ranks, these start each other along a ``tree``.
``fork_locks`` holds locks while a worker is forked, and ``limits`` explains why a worker could not be
started.
"""
