"""Communicators: collectives on arrays, called by all ranks inside one command.

``base`` is the interface, which ``tests/specifications`` specifies. ``shm`` works in shared memory,
``nccl`` on GPUs, and ``linked`` by messages. ``staged`` copies the arrays of a device to shared memory
and back.

``formats`` are the formats in which arrays are sent between machines, and ``wires`` all-reduces in them
and keeps their state: in ``coded`` numbers, the largest numbers (``sparse``), or factors of matrices
(``low_rank``).
"""
