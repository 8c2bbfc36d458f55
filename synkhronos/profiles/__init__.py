"""Profiles: how each rank spends its time.

``profile`` is the block that measures, and its result. ``log`` has the record of each rank, and the
commands that begin and end it; ``categories`` are the kinds of its events. ``operations`` sums up the
operations of compiled functions, and ``waits`` finds which rank waits for which. ``timeline`` and
``drawing`` draw a profile, and ``trace`` writes it for other programs.
"""
