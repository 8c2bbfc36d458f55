"""Collectives on arrays, called by every rank inside the same command."""
