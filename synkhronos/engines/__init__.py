"""Graph compilers with their array types."""
