"""The user's arrays, in memory that every rank can access.

``data`` has `Data`, and creates it; ``binding`` binds `Data` to variables; ``objects`` has inputs
that are not dense arrays: sparse matrices, and objects of any type.
"""
