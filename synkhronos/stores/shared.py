"""The store of ranks that share the memory of one machine: arrays are viewed where possible."""

from __future__ import annotations

import math
from typing import Sequence

import numpy as np

from synkhronos._typing import DTypeLike
from synkhronos.stores.base import Store
from synkhronos.stores.handle import Handle
from synkhronos.stores.memory import SharedMemory
from synkhronos.stores.named_memory import LockFile, SharedNamedMemory


class SharedHandle(Handle):
    """The offset of an array in the shared memory."""

    __slots__ = ("offset", "shape", "dtype", "copy")

    def __init__(
        self, offset: int, shape: tuple[int, ...], dtype: str, copy: np.ndarray | None = None
    ) -> None:
        self.offset, self.shape, self.dtype = offset, shape, dtype
        self.copy = copy  # keeps the copy made by `put` alive

    def __reduce__(self) -> tuple:
        return SharedHandle, (self.offset, self.shape, self.dtype)


class SharedMemoryStore(Store):
    """Arrays in shared memory; ranks get views.

    Parameters
    ----------
    memory : SharedMemory
        The memory of the arrays.
    locks : LockFile, optional
        The locks of the named memory, by default new ones.
    """

    epoch, is_shared = 0, True

    def __init__(self, memory: SharedMemory, locks: LockFile | None = None) -> None:
        super().__init__()
        self.memory = memory
        self.ranks = memory.ranks
        self.named_memory = SharedNamedMemory(memory, locks)

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        dtype = np.dtype(dtype)
        return self.memory.allocate(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def place(self, array: np.ndarray) -> np.ndarray:
        """Return `array` itself if it is in shared memory, else a copy in shared memory."""
        if array in self.memory:
            return array
        placed = self.empty(array.shape, array.dtype)
        placed[...] = array
        return placed

    def put(self, array: np.ndarray, constant: bool = False) -> SharedHandle:
        placed = self.place(array)
        copy = None if placed is array else placed
        return SharedHandle(self.memory.offset(placed), array.shape, array.dtype.str, copy)

    def _get(self, handle: SharedHandle) -> np.ndarray:
        return np.ndarray(handle.shape, handle.dtype, self.memory.mapping, handle.offset)

    def free(self, handle: SharedHandle) -> None:
        handle.copy = None

    def __contains__(self, array: np.ndarray) -> bool:
        return array in self.memory

    def collect(self) -> None:
        self.memory.collect()

    def trim(self) -> None:
        self.memory.trim()

    def trim_others(self) -> None:
        super().trim_others()
        self.memory.trim_others()
