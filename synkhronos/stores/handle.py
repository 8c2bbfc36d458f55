"""Handles, by which any rank can access an array, and which rows of arrays ranks need.

An array is in the memory of a store or in a file: every rank maps the file of a ``numpy.memmap`` itself.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
from dataclasses import dataclass
from typing import Any, Callable, Hashable, Iterable, NamedTuple

import numpy as np

from synkhronos._typing import Rows
from synkhronos.arithmetic.comparison import digest
from synkhronos.arithmetic.partition import as_slice
from synkhronos.host.handler_errors import reraise_if_handlers


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
        """Return rows of the object, a matrix, along axis 0."""
        return self.open(store)[as_slice(rows) if type(rows) is range else rows]


# Arrays in files


@dataclass(frozen=True)
class FileHandle(Handle):
    """The place of an array in a file.

    Attributes
    ----------
    filename : str
        The path of the file.
    dtype, shape : str, tuple of int
        As of other handles.
    offset : int
        Bytes from the start of the file.
    identity : tuple of int
        Device, inode and change time of the file.
    """

    filename: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    identity: tuple[int, int, int]


def locate_in_file(value: Any) -> FileHandle | None:
    """Return the place of a ``numpy.memmap`` in its file, or None if other ranks cannot map it.

    Copy-on-write mappings, and views that are not C-contiguous or not aligned, cannot be mapped.
    """
    if not isinstance(value, np.memmap) or value.filename is None or value.mode == "c":
        return None
    mapping = value._mmap  # type: ignore[attr-defined]
    if mapping is None or not value.flags.c_contiguous or not value.flags.aligned:
        return None
    start = value.offset - value.offset % mmap.ALLOCATIONGRANULARITY
    first = np.frombuffer(mapping, np.uint8).ctypes.data
    offset = start + value.ctypes.data - first
    filename = os.fspath(value.filename)
    try:
        status = os.stat(filename)
    except OSError as error:  # deleted: no other rank can open it
        reraise_if_handlers(error)
        return None
    if not _is_open(status):  # another file has its name now
        return None
    identity = status.st_dev, status.st_ino, status.st_ctime_ns
    return FileHandle(filename, value.dtype.str, value.shape, offset, identity)


def _is_open(status: os.stat_result) -> bool:
    """Whether this process has a file open; a mapping keeps its file open."""
    for number in os.listdir("/dev/fd"):
        try:
            if os.path.samestat(os.fstat(int(number)), status):
                return True
        except OSError as error:  # the descriptor used to read the list
            reraise_if_handlers(error)
            continue
    return False


def find_same_file(handle: FileHandle, expected: bytes) -> FileHandle | None:
    """Return the place of an array in a file of this machine that has the same name and contents.

    Memory of a process, which has a name in ``/proc``, changes all the time, and a process of the same
    number on this machine has another memory. So it does not count.

    Parameters
    ----------
    handle : FileHandle
        Of another machine.
    expected : bytes
        The digest of the array there.
    """
    if handle.filename.startswith("/proc/"):
        return None
    try:
        status = os.stat(handle.filename)
        identity = status.st_dev, status.st_ino, status.st_ctime_ns
        own = dataclasses.replace(handle, identity=identity)
        return own if digest(map_file(own)) == expected else None
    except (OSError, ValueError) as error:  # there is none, or it is shorter
        reraise_if_handlers(error)
        return None


def map_file(handle: FileHandle) -> np.ndarray:
    """Return the array of a handle, read-only.

    Raises
    ------
    OSError
        If the file no longer exists, or another file has its name.
    """
    filename = handle.filename
    # Without O_NONBLOCK, opening a named pipe that has the name of the file would block.
    with open(filename, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if (status.st_dev, status.st_ino) != handle.identity[:2]:
            raise OSError(
                f"Data of a numpy.memmap: {filename} is no longer the file that was mapped; "
                f"call set_value() with a memmap of the new file"
            )
        mapped = np.memmap(file, handle.dtype, "r", handle.offset, handle.shape)
        return mapped.view(np.ndarray)


# Rows that ranks need


class RequiredRows(NamedTuple):
    """The rows of an array that some ranks need.

    Attributes
    ----------
    handle : Handle
        The array.
    rows : range, numpy.ndarray or None
        None for the whole array.
    axis : int
        The axis of the rows.
    lasts : bool
        Whether the ranks keep the array after the command.
    """

    handle: Any
    rows: Rows | None = None
    axis: int = 0
    lasts: bool = False


#: ``needs(ranks, size)`` returns the needs of consecutive ranks, a ``range``.
Needs = Callable[[range, int], Iterable[RequiredRows]]


def combine(needs: Iterable[RequiredRows]) -> list[RequiredRows]:
    """Return one `RequiredRows` for each handle, with all rows of its needs."""
    combined: dict[Hashable, RequiredRows] = {}
    for need in needs:
        former = combined.get(need.handle)
        if former is None:
            combined[need.handle] = _with_unique_rows(need)
        elif former.rows is not None:
            combined[need.handle] = _both(former, need)
    return list(combined.values())


def _with_unique_rows(need: RequiredRows) -> RequiredRows:
    if need.rows is None or type(need.rows) is range:
        return need
    return need._replace(rows=np.unique(need.rows))


def _both(one: RequiredRows, other: RequiredRows) -> RequiredRows:
    if other.rows is None or one.axis != other.axis:
        return RequiredRows(one.handle)
    if type(one.rows) is type(other.rows) is range and one.rows == other.rows:
        return one
    # With a dtype, as an empty range would become an array of floats.
    rows = [np.asarray(need.rows, np.int64) for need in (one, other)]
    return one._replace(rows=np.union1d(*rows))


def positions(rows: Rows, among: Rows) -> Rows:
    """Return where each of `rows` is in `among`, a range or a sorted array that has all of them."""
    if type(among) is not range:
        return np.searchsorted(among, rows)
    if type(rows) is not range:
        return (rows - among.start) // among.step
    if not rows:
        return range(0)
    first = (rows[0] - among.start) // among.step
    step = rows.step // among.step
    return range(first, first + step * (len(rows) - 1) + (1 if step > 0 else -1), step)
