"""Comparing the replicas of different ranks, and the results of calls with the serial results.

In the first calls of a function, ``watch`` warns if the replicas are not equal, and with
``fork(check=True)`` it raises an error in every call.

``trial_runs`` are runs of calls without effects, on one rank and on all. ``serial_comparison`` compares
their results, for `Function.check` and, on a few rows, for ``first_calls``; ``reasons`` finds why
results differ.
"""
