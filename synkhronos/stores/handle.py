"""A handle: where an array is, for any rank."""

from __future__ import annotations


class Handle:
    """Where an array is, for any rank. It is small, and pickled with commands.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
        As NumPy's ``dtype.str``.
    """

    __slots__ = ()

    shape: tuple[int, ...]
    dtype: str
