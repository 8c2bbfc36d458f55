"""Shared variables across ranks.

``naming`` checks which variables a call means; ``replicas`` reads and writes each rank's own value;
``collectives`` broadcast, gather and reduce them.

May import: ``arithmetic``, ``world``, ``arrays``, ``functions``.
"""
