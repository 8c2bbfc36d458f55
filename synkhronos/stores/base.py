"""The interface of stores, and the store of ranks that share the memory of one machine.

``tests/specifications/store.py`` is the specification, with checks. In shared memory, arrays are viewed
where possible.

The script can have memory, too, that every process of the machine can map, also those that exist
already. It is a file without a name: nothing can be left behind in ``/dev/shm``. While the process that
made it has it open, the processes of the same user can open it by a path in ``/proc``. So a
``numpy.memmap`` of it is not copied into a `Data`: the ranks map it themselves.
"""

from __future__ import annotations

import errno
import functools
import math
import mmap
import os
from abc import ABC, abstractmethod
from typing import Any, Sequence

import numpy as np

from synkhronos._typing import DTypeLike, Rows
from synkhronos.host.descriptors import open_unnamed
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.stores.handle import FileHandle, Handle, map_file
from synkhronos.stores.memory import SharedMemory, check_memory
from synkhronos.stores.named_memory import NamedMemory

_MOST_FILES = 64  # that a rank keeps mapped


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
        self._map_file = functools.lru_cache(_MOST_FILES)(map_file)

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
            return self._map_file(handle)
        return self._get(handle)

    @abstractmethod
    def _get(self, handle: Any) -> np.ndarray:
        """Like `get`, for handles that were returned by `put`."""

    def find(self, handle: Handle, rows: Rows) -> tuple[np.ndarray, Rows]:
        """Return an array that contains rows of a handle's array, and the rows' numbers in it.

        Parameters
        ----------
        rows : range or numpy.ndarray of int64
            Row numbers, none negative and none out of range.
        """
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


# On one machine


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
    named_memory : NamedMemory, optional
        By default new named memory.
    """

    epoch, is_shared = 0, True

    def __init__(self, memory: SharedMemory, named_memory: NamedMemory | None = None) -> None:
        super().__init__()
        self.memory = memory
        self.ranks = memory.ranks
        self.named_memory = NamedMemory(memory) if named_memory is None else named_memory

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
