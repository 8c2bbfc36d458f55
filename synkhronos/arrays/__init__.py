"""The user's arrays, in memory that every rank can access.

``data`` has `Data`; ``binding`` binds `Data` to variables.

May import: ``arithmetic``, ``stores``, ``world``.
"""
