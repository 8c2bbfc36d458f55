"""A handle, by which any rank can access an array."""

from __future__ import annotations


class Handle:
    """Identifies an array for any rank. Handles are small and are pickled with commands.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
        As NumPy's ``dtype.str``.
    """

    __slots__ = ()

    shape: tuple[int, ...]
    dtype: str
