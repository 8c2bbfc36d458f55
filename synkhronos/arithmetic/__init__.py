"""Arithmetic on row numbers, values and states of random generators.

``partition`` says which rows each rank gets, ``operations`` what ``"avg"`` or ``"max"`` means,
``conversion`` makes arrays of what a user gives, and ``streams`` moves random generators ahead. These
are pure functions and small classes on NumPy arrays. They know nothing of processes, shared memory or
graph compilers, so every other folder may use them.

May import: nothing.
"""
