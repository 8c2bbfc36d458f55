"""PyTensor: ``engine`` runs it on NumPy arrays, and ``jax_engine`` on JAX arrays.

May import: what ``engines`` may.
"""
