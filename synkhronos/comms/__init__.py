"""Communicators: collectives on arrays, called by all ranks inside one command.

``base`` is the interface; ``naive`` is its specification. ``shm`` works in shared memory, ``nccl`` on
GPUs, ``linked`` by messages, and ``alone`` for a single rank. ``machines`` combines one inside each
machine and one between them; ``staged`` copies the arrays of a device to shared memory and back.

May import: ``arithmetic``.
"""
