"""The user's arrays, in memory that every rank can reach.

``data`` is `Data`, ``binding`` is `Data` bound to variables.

May import: ``arithmetic``, ``stores``, ``world``.
"""
