"""Comparing the replicas of different ranks, and the results of calls with the serial results.

``replicas`` has the command with which all ranks return digests or samples of their replicas, before and
after a call. In the first calls of a function, ``watch`` warns if they are not equal, and with
``fork(check=True)`` it raises an error in every call.

``trial_runs`` are runs of calls without effects, on one rank and on all. ``serial_comparison`` compares
their results, for `Function.check` and, on a few rows, for ``first_calls``; ``reasons`` finds why
results differ.
"""
