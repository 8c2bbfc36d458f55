"""Stores: arrays that every rank can access through a small handle.

``base`` is the interface, which ``tests/specifications`` specifies, and the store of ranks that share
the memory of one machine, which ``memory`` allocates. ``handle`` defines the handles that ranks send
to each other, also those of arrays in files, and which rows of arrays other ranks need.
``named_memory`` has the arrays and locks that belong to no rank.
"""
