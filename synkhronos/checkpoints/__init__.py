"""Checkpoints: files with the shared variables and random streams of all ranks.

``checkpoint`` has ``save`` and ``load``; ``feedback`` is the state that machines keep for wire formats;
``manifest`` describes the arrays of a checkpoint, and ``matching`` finds which variable here they belong
to; ``archive`` reads and writes the file; ``replacing`` replaces a file in a single step.
"""
