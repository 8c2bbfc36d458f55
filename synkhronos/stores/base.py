"""The interface of stores. ``tests/specifications/store.py`` is the specification, with checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Sequence

import numpy as np

from synkhronos._typing import DTypeLike, Rows
from synkhronos.arithmetic.partition import take_rows
from synkhronos.stores.files import FileHandle, MappedFiles
from synkhronos.stores.handle import Handle
from synkhronos.stores.named_memory import NamedMemory


class Store(ABC):
    """Arrays that every rank can access.

    One rank puts an array into the store and sends the handle to other ranks, in a command or a reply.
    They use the handle to get the array, or some of its rows, with the values of that moment. The result
    may be a view of the original array or a copy, so it must only be read.

    Attributes
    ----------
    ranks : int
        The number of ranks for which it has room.
    epoch : int or None
        As long as this number is the same, the ranks get the same views for a handle and a range of
        rows, command after command, and these reflect every change. With None they may get copies.
    is_shared : bool
        Whether every rank always gets a view of the whole array of a handle.
    named_memory : NamedMemory
        The arrays and locks that belong to no rank.
    """

    ranks: int
    named_memory: NamedMemory
    epoch: int | None = None
    is_shared: bool = False

    def __init__(self) -> None:
        self._files = MappedFiles()

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        """Return a new, uninitialized array, which `put` does not copy.

        Raises
        ------
        MemoryError
            If there is too little memory. The message says how much is available.
        """

    @abstractmethod
    def put(self, array: np.ndarray, constant: bool = False) -> Handle:
        """Return a handle to an array.

        An array returned by `empty`, or a C-contiguous view of it, is not copied. The caller must keep
        it alive while the handle is used. Any other array is copied; the copy lives as long as this
        handle object, or until `free`.

        Parameters
        ----------
        array : numpy.ndarray
            The array.
        constant : bool
            Whether it never changes. Other machines then keep it as long as this handle object lives.
        """

    def get(self, handle: Handle) -> np.ndarray:
        """Return the array of a handle."""
        if isinstance(handle, FileHandle):
            return self._files.get(handle)
        return self._get(handle)

    @abstractmethod
    def _get(self, handle: Any) -> np.ndarray:
        """Like `get`, for handles that were returned by `put`."""

    def rows(
        self, handle: Handle, rows: Rows, out: np.ndarray | None = None, axis: int = 0
    ) -> np.ndarray:
        """Return rows of the array of a handle.

        Parameters
        ----------
        rows : range or numpy.ndarray of int64
            Row numbers, none negative and none out of range.
        out : numpy.ndarray, optional
            Memory for a copy of the rows, if a view is not possible; by default a new array. Its first
            axis is the axis of the rows.
        axis : int, default: 0
            The axis of the rows.
        """
        array, rows = self.find(handle, rows)
        if axis:
            return np.moveaxis(take_rows(np.moveaxis(array, axis, 0), rows, out), 0, axis)
        return take_rows(array, rows, out)

    def find(self, handle: Handle, rows: Rows) -> tuple[np.ndarray, Rows]:
        """Return an array that contains rows of a handle's array, and the rows' numbers in it."""
        return self.get(handle), rows

    @abstractmethod
    def free(self, handle: Any) -> None:
        """Free the copy that `put` made for this handle. The handle must not be used afterwards."""

    @abstractmethod
    def __contains__(self, array: np.ndarray) -> bool:
        """Whether `put` would take this array without a copy."""

    def collect(self) -> None:  # noqa: B027
        """Make the memory of deallocated arrays available again. It is called before each command."""

    def trim(self) -> None:  # noqa: B027
        """Return all free memory of this rank to the system."""

    def trim_others(self) -> None:
        """Return the other ranks' memory and the named memory to the system, after they have ended."""
        self.named_memory.clear()

    def close(self) -> None:
        """Free all resources other than memory, at the end of a world."""
        self.named_memory.close()
