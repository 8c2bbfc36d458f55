"""Shared variables across ranks.

``arguments`` checks the variables and values in a call; ``replicas`` reads and writes the replicas of
each rank; ``collectives`` has broadcast, gather and reduce, and compares the replicas; ``reductions``
has the command of a reduction, which completes those that began while a function computed.
"""
