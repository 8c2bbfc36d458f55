"""Communicators: collectives on arrays, called by all ranks inside one command.

``base`` is the interface, ``naive`` its specification. ``shm`` works in shared memory, ``nccl`` on GPUs,
and ``staged`` copies the arrays of a device to shared memory and back.

May import: ``arithmetic``.
"""
