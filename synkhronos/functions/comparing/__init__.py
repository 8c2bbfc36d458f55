"""Comparing the replicas of different ranks, and the results of calls with the serial results.

In the first calls of a function, ``watch`` warns if the results are not the serial ones, or if the
replicas are not equal. With ``fork(check=True)`` it compares the replicas in every call, and raises an
error.

``trial_runs`` are runs of calls without effects, on one rank and on all. ``serial_comparison`` compares
their results, and finds why they differ, for `Function.check` and, on a few rows, for ``watch``.
"""
