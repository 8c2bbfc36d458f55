"""The store of ranks that share the memory of one machine: arrays are viewed where possible.

The script can have memory, too, that every process of the machine can map, also those that exist
already. It is a file without a name: nothing can be left behind in ``/dev/shm``. While the process that
made it has it open, the processes of the same user can open it by a path in ``/proc``. So a
``numpy.memmap`` of it is not copied into a `Data`: the ranks map it themselves.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from typing import Any, Sequence

import numpy as np

from synkhronos._typing import DTypeLike
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.stores.base import Store
from synkhronos.stores.handle import Handle
from synkhronos.stores.memory import SharedMemory, check_memory
from synkhronos.stores.named_memory import SharedNamedMemory, open_unnamed


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
    named_memory : SharedNamedMemory, optional
        By default new named memory.
    """

    epoch = 0

    def __init__(self, memory: SharedMemory, named_memory: SharedNamedMemory | None = None) -> None:
        super().__init__()
        self.memory = memory
        self.ranks = memory.ranks
        self.named_memory = SharedNamedMemory(memory) if named_memory is None else named_memory

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


class MappedMemory:
    """Zeroed memory that other processes can map by its path.

    Parameters
    ----------
    nbytes : int
        The size. The pages are allocated at once, so that a lack of memory is an error here, and does
        not end the process that writes to them.
    label : str
        A name for lists of the files that a process has open.

    Attributes
    ----------
    path : str
        Where other processes of this machine open it, until `close`.
    array : numpy.memmap
        All of it, of dtype uint8. Its views stay valid after `close`, but their contents are zero.

    Raises
    ------
    MemoryError
        If there is too little memory.
    """

    def __init__(self, nbytes: int, label: str) -> None:
        check_memory(nbytes)
        self._file = open_unnamed(label)
        number = self._file.fileno()
        try:
            os.posix_fallocate(number, 0, nbytes)
        except OSError as error:
            reraise_if_handlers(error)
            self._file.close()
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            raise MemoryError(f"shared memory: {nbytes} bytes were requested: {error}") from error
        self.path = f"/proc/{os.getpid()}/fd/{number}"
        self.array = map_memory(self.path)

    def close(self) -> None:
        """Return the pages to the system. Other processes cannot map it any more."""
        if self._file.closed:
            return
        mapping: Any = self.array._mmap  # type: ignore[attr-defined]
        mapping.madvise(mmap.MADV_REMOVE)
        self._file.close()


def map_memory(path: str) -> np.memmap:
    """Return the memory that another process of this machine, or this one, has at a path.

    Raises
    ------
    OSError
        If there is none: it was closed, or its process has ended or runs on another machine.
    """
    return np.memmap(path, np.uint8, "r+")
