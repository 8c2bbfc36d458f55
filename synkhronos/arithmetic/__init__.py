"""Arithmetic on row numbers, values and states of random generators.

``partition`` determines the rows of each rank, and the parts of a vector that are reduced one after
another; ``minibatches`` the rows of a rank in each step; ``machines`` the ranks of each machine, the
tree along which they start, and times by other machines' clocks. ``operations`` defines the
reductions, and ``pairwise`` the order in which machines combine arrays. ``conversion`` converts the
user's values to arrays, ``comparison`` compares arrays, and ``streams`` advances random generators.
These are pure functions and small classes on NumPy arrays. They know nothing about processes, shared
memory or graph compilers, so every other folder may use them.
"""
