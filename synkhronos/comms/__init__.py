"""Communicators: collectives on arrays, called by all ranks inside one command.

``base`` is the interface; ``naive`` is its specification. ``shm`` works in shared memory, ``nccl`` on
GPUs, ``linked`` by messages, and ``alone`` for a single rank. ``machines`` combines one inside each
machine and one between them; ``staged`` copies the arrays of a device to shared memory and back.

``formats`` are the forms in which arrays travel between machines, and ``wires`` all-reduces in them:
``coded`` numbers, the largest ones (``sparse``), or factors of matrices (``low_rank``). ``buckets``
reduces a vector part by part, for ranks that compute meanwhile. ``kept`` is what leaders keep from one
reduction to the next, as vectors that can be stored.

May import: ``arithmetic``.
"""
