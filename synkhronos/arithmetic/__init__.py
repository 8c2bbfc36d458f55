"""Arithmetic on row numbers, values and states of random generators.

``partition`` determines the rows of each rank, ``minibatches`` the rows of a rank in each step, and
``rank_ranges`` the ranks of each machine, along whose ``trees`` commands travel. ``buckets`` divides a
vector into parts that are reduced one after another. ``operations`` defines the reductions, of which
``averages`` computes the averages, and ``pairwise`` the order in which machines combine arrays.
``conversion`` converts the user's values to arrays, ``comparison`` compares arrays, ``streams`` advances
random generators, and ``clocks`` converts times of another machine's clock. These are pure functions and
small classes on NumPy arrays. They know nothing about processes, shared memory or graph compilers, so
every other folder may use them.
"""
