"""Shared variables across ranks.

``arguments`` checks the variables and values in a call; ``replicas`` reads and writes the replicas of
each rank; ``collectives`` has broadcast, gather and reduce; ``reductions`` checks and carries out the
latter, some of which may have ``begun`` while a function computed; ``in_sync`` compares the replicas.

May import: ``arithmetic``, ``stores``, ``comms``, ``engines``, ``world``, ``arrays``, ``functions``.
"""
