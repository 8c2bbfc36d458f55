"""Profiles: how each rank spends its time.

``profile`` is the block that measures, and its result. ``log`` has the record of each rank, and the
commands that begin and end it. ``operations`` sums up the operations of compiled functions. ``trace``
writes a profile for other programs, and finds which rank waits for which; ``drawing`` draws it.
"""
