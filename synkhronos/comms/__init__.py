"""Communicators: collectives on arrays, called by all ranks inside one command.

``base`` is the interface; ``naive`` is its specification. ``shm`` works in shared memory and ``nccl`` on
GPUs; ``staged`` copies the arrays of a device to shared memory and back.

May import: ``arithmetic``.
"""
