"""Checkpoints: files with the shared variables and random streams of all ranks.

``checkpoint`` has ``save`` and ``load``; ``manifest`` describes the arrays of a checkpoint; ``archive``
reads and writes the file.

May import: ``arithmetic``, ``stores``, ``world``, ``functions``.
"""
