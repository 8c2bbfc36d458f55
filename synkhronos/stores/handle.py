"""A handle, by which any rank can access an array, or an object that consists of arrays."""

from __future__ import annotations

from typing import Any

from synkhronos._typing import Rows


class Handle:
    """Identifies an array for any rank. Handles are small and are pickled with commands.

    Attributes
    ----------
    shape : tuple of int
        The shape of the array.
    dtype : str
        As NumPy's ``dtype.str``.
    """

    __slots__ = ()

    shape: tuple[int, ...]
    dtype: str


class Composite:
    """Identifies an object that a rank assembles, from arrays in the store or by itself."""

    # Not an ABC: every call checks the class of each of its handles, which is slow with an ABC.

    def open(self, store: Any) -> Any:
        """Return the object."""
        raise NotImplementedError

    def parts(self) -> list[Handle]:
        """Return the handles of the arrays that it consists of."""
        return []

    def rows(self, store: Any, rows: Rows) -> Any:
        """Return rows of the object, along axis 0."""
        raise TypeError(f"{type(self).__name__}: it has no rows")
