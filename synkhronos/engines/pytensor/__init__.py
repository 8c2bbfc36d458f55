"""PyTensor: ``engine`` runs it on NumPy arrays, and ``jax_engine`` on JAX arrays."""
