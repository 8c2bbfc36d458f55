"""Shared variables across ranks.

``replicas`` checks the variables and values in a call, and reads and writes the replicas of each rank.
``collectives`` has broadcast, gather and reduce, with their commands, and compares the replicas; its
reductions complete those that began while a function computed.
"""
