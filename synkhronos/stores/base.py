"""What a store must do. `naive` says it in the fewest words; ``tests/checks/stores.py`` conforms it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Sequence

import numpy as np

from synkhronos._typing import DTypeLike, Rows
from synkhronos.arithmetic.partition import take_rows
from synkhronos.stores.files import FileHandle, MappedFiles
from synkhronos.stores.handle import Handle


class Store(ABC):
    """Arrays that every rank can reach.

    One rank puts an array in and sends the handle to others, by a command or a reply; these get the
    array, or some of its rows, by the handle. What they get has the values that the array has at that
    moment. It may be a view of the memory of the array itself or a copy; so it is for reading.

    Attributes
    ----------
    ranks : int
        How many ranks it has room for.
    is_shared : bool
        Whether what ranks get are views of the memory of the arrays themselves, which follow every
        change, and not copies.
    """

    ranks: int
    is_shared: bool = False

    def __init__(self) -> None:
        self._files = MappedFiles()

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        """Return a new, uninitialised array, which `put` need not copy.

        Raises
        ------
        MemoryError
            If there is no room for it; the message says how much there is.
        """

    @abstractmethod
    def put(self, array: np.ndarray) -> Handle:
        """Return a handle to an array.

        An array that `empty` returned, or a C-contiguous view of one, is not copied: who calls this
        keeps it alive for as long as the handle is used. Of any other array a copy is made, which lives
        as long as this very handle, or until `free`.
        """

    def get(self, handle: Handle) -> np.ndarray:
        """Return the array of a handle."""
        if isinstance(handle, FileHandle):
            return self._files.get(handle)
        return self._get(handle)

    @abstractmethod
    def _get(self, handle: Handle) -> np.ndarray:
        """As `get`, for handles that `put` returned."""

    def rows(
        self, handle: Handle, rows: Rows, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Return rows of the array of a handle.

        Parameters
        ----------
        rows : range or numpy.ndarray of int64
            Row numbers, none negative and none out of range.
        out : numpy.ndarray, optional
            Where to copy the rows if they cannot be a view; else a new array is made.
        """
        return take_rows(self.get(handle), rows, out)

    @abstractmethod
    def free(self, handle: Handle) -> None:
        """Free the copy that `put` made for this handle, which must not be used any more."""

    @abstractmethod
    def __contains__(self, array: np.ndarray) -> bool:
        """Whether `put` would take this array without a copy."""

    def collect(self) -> None:  # noqa: B027
        """Make the memory of arrays that died available for new ones; called before each command."""

    def trim(self) -> None:  # noqa: B027
        """Return all free memory of this rank to the system."""

    def trim_others(self) -> None:  # noqa: B027
        """Return all memory of the other ranks to the system, once they have ended."""
