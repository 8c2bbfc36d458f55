"""Naive implementations of the interfaces, which specify them: short enough to be read."""
