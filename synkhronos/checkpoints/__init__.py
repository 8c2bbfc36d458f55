"""Checkpoints: files with the shared variables and random streams of all ranks.

``checkpoint`` has ``save`` and ``load``; ``feedback`` is the state that machines keep for wire formats;
``manifest`` describes the arrays of a checkpoint, and finds which variable here they belong to;
``archive`` reads and writes the file, which it replaces in a single step.
"""
