"""PyTensor: ``engine`` runs it on NumPy arrays, and ``jax_engine`` on JAX arrays.

``jax_linker`` makes functions of JAX from graphs.
"""
