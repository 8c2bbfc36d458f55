"""Communicators: collectives on arrays, called by all ranks inside one command.

``base`` is the interface, which ``tests/specifications`` specifies, and prepares collectives for
callers that repeat them. ``shm`` works in shared memory, ``nccl`` on GPUs, ``linked`` by messages, with
the algorithm ``direct`` for large arrays, and ``single_rank`` alone. ``staged`` copies the arrays of a
device to shared memory and back.

``formats`` are the formats in which arrays are sent between machines, and ``wires`` all-reduces in them:
in ``coded`` numbers, the largest numbers (``sparse``), or factors of matrices (``low_rank``).
``wire_state`` is the state of wires between reductions, as vectors that can be stored.
"""
