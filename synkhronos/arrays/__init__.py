"""The user's arrays, in memory that every rank can access.

``data`` has `Data`, which ``create`` creates; ``binding`` binds `Data` to variables; ``objects`` has
inputs that are not dense arrays: sparse matrices, and objects of any type.
"""
