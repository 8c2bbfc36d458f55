"""Memory that belongs to no rank, and locks that are free when their holder has died.

A block of a rank's own span is freed when the rank's array dies, and is lost with the rank. The named
memory have the arrays that several ranks change at their own pace, or that must outlive any rank. These
arrays have names. Any rank can get or create them at any time, without the other ranks.

A rank may be killed at any point, so nothing may depend on its next step:

- The arrays are listed in a log of records, in shared memory. A record counts once the log's length
  includes it, which is one aligned store at the end. The memory in use follows from the records. So a
  rank that dies while it creates an array leaves nothing but pages of zeros.
- A lock is a byte of a file without a name, locked by ``fcntl``. These locks belong to processes, and
  the kernel releases them when their process ends in any way. A process that a rank forks does not
  inherit them. They would all be lost if the process closed any descriptor of the file, but only this
  module has a descriptor, which forked processes inherit and ``exec`` closes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import mmap
import os
import pickle
import struct
import time
import weakref
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from synkhronos._typing import DTypeLike
from synkhronos.host.descriptors import open_unnamed
from synkhronos.host.handler_errors import is_of_handler
from synkhronos.stores.memory import SharedMemory

#: Numbers of locks are below this.
N_LOCKS = 1 << 61
#: The numbers from here on belong to names: a block of this many for each.
_BLOCK = 1 << 20

_PAGE = mmap.PAGESIZE
_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64
_LENGTH, _GENERATION = 0, 1  # words of the header: the bytes of the log, the number of `clear`
_WORD = struct.Struct("q")  # the length of a record, before it
_NAP = 2e-4  # seconds
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of Linux: type, whence, start, length, process


def checked(name: str, shape: int | Sequence[int], dtype: DTypeLike) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and the dtype of an array to be created, or raise an error with the reason."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"named memory: expected a name, a string that is not empty, got {name!r}")
    extents = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if any(not isinstance(extent, (int, np.integer)) or extent < 0 for extent in extents):
        raise ValueError(f"named memory: expected a shape of integers >= 0 for {name!r}, got {shape}")
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(
            f"named memory: the array {name!r} cannot have the dtype {dtype}: Python objects are of no "
            f"use to other processes; use numbers"
        )
    return tuple(int(extent) for extent in extents), dtype


def check_same(
    name: str, there: tuple[tuple[int, ...], np.dtype], asked: tuple[tuple[int, ...], np.dtype]
) -> None:
    """Raise if an array exists with a shape or dtype other than the requested one."""
    if there != asked:
        raise ValueError(
            f"named memory: the array {name!r} has the shape {there[0]} and the dtype {there[1]}; asked "
            f"for were {asked[0]} and {asked[1]}; use the same everywhere, or another name"
        )


def check_index(index: int) -> int:
    """Return the number of a lock, or raise if there is none with this number."""
    if not 0 <= index < N_LOCKS:
        raise IndexError(f"named memory: expected the number of a lock in 0..{N_LOCKS - 1}, got {index}")
    return int(index)


class LockFile:
    """A file without a name; each of its bytes is a lock. It is opened before any rank is forked.

    Parameters
    ----------
    file : file object, optional
        By default a new file.
    """

    def __init__(self, file: Any = None) -> None:
        self._file = open_unnamed("synkhronos-locks") if file is None else file
        self.number = self._file.fileno()
        # It has nothing to do after `close`, so no signal handler can run in it then.
        self._finish = weakref.finalize(self, self._file.close)
        # Record locks do not exclude this process itself, so its own locks are listed here. A forked
        # process has another id, and so holds nothing.
        self.held: dict[tuple[int, int], object] = {}

    def close(self) -> None:
        """Close the file; no lock can be taken afterwards."""
        self._file.close()
        self._finish.detach()

    def release_all(self) -> None:
        """Give back all locks that this process holds."""
        fcntl.lockf(self.number, fcntl.LOCK_UN)
        self.held.clear()


class Lock:
    """A byte of a `LockFile`: a lock that any rank can hold. It is free when its holder has died."""

    __slots__ = ("_file", "_byte")

    def __init__(self, file: LockFile, byte: int) -> None:
        self._file, self._byte = file, byte

    def try_acquire(self) -> bool:
        """Take the lock; return False if any rank holds it, including this rank. It never waits."""
        held, key, token = self._file.held, (os.getpid(), self._byte), object()
        if held.setdefault(key, token) is not token:  # atomic, even among threads
            return False
        try:
            fcntl.lockf(self._file.number, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._byte)
        except BaseException as error:
            del held[key]
            is_taken = isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EAGAIN)
            if is_taken and not is_of_handler(error.__traceback__):
                return False
            if not isinstance(error, OSError) or is_of_handler(error.__traceback__):
                # A signal handler has raised it, perhaps after the lock was acquired.
                fcntl.lockf(self._file.number, fcntl.LOCK_UN, 1, self._byte)
            raise
        return True

    def release(self) -> None:
        """Give the lock back.

        Raises
        ------
        RuntimeError
            If this rank does not hold it.
        """
        key = os.getpid(), self._byte
        if key not in self._file.held:
            raise RuntimeError(f"named memory: the lock {self._byte} is not held by this rank")
        fcntl.lockf(self._file.number, fcntl.LOCK_UN, 1, self._byte)
        del self._file.held[key]

    def is_free(self) -> bool:
        """Whether no rank holds it."""
        if (os.getpid(), self._byte) in self._file.held:
            return False
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._byte, 1, 0)
        answer = fcntl.fcntl(self._file.number, fcntl.F_GETLK, asked)
        return _FLOCK.unpack(answer)[0] == fcntl.F_UNLCK


def _sleep() -> None:
    time.sleep(_NAP)


class NamedMemory:
    """Arrays and locks that belong to no rank: a span of the shared memory, and a `LockFile`.

    One thread of each rank uses it at a time. ``tests/specifications/store.py`` has the specification.

    Parameters
    ----------
    memory : SharedMemory
        Its first span that belongs to no rank is used.
    locks : LockFile, optional
        By default a new file.

    Attributes
    ----------
    pause : callable
        Called while this rank waits for another rank that holds a lock briefly, and may have been
        stopped. It sleeps briefly; see `pausing`.
    """

    pause: Callable[[], None] = staticmethod(_sleep)

    def __init__(self, memory: SharedMemory, locks: LockFile | None = None) -> None:
        self.memory = memory
        self._file = LockFile() if locks is None else locks
        self._directory = Lock(self._file, N_LOCKS)  # held while the directory changes
        self._start, self._large, self._stop = memory.parts_of_span(memory.ranks)
        self._header = np.ndarray(8, np.int64, memory.mapping, self._start).data
        self._log = self._start + _PAGE
        self._forget()

    def _forget(self) -> None:
        """Start to read the directory from its beginning."""
        self._read = 0  # bytes of the log
        self._places: dict[str, tuple] = {}  # offset, shape and dtype by name
        self._next_small = self._log + (self._large - self._log) // 2 // _PAGE * _PAGE
        self._end_of_log = self._next_small
        self._next_large = self._large
        self._generation = self._header[_GENERATION]  # last, as an interrupt may come in between

    @contextlib.contextmanager
    def pausing(self, pause: Callable[[], None]) -> Iterator[None]:
        """Inside the block, let this rank pause by ``pause()``.

        It sleeps briefly, and raises if this rank must not wait any longer.
        """
        self.pause = pause
        try:
            yield
        finally:
            self.pause = _sleep

    def array(self, name: str, shape: int | Sequence[int], dtype: DTypeLike) -> np.ndarray:
        """Return the array that all ranks know by this name. It is zero when it is first requested.

        Raises
        ------
        ValueError
            If it exists with another shape or dtype.
        MemoryError
            If there is too little memory. The message says how much is available.
        """
        asked = checked(name, shape, dtype)
        self._follow()
        if name not in self._places:
            self.memory.check_ours()
            while not self._directory.try_acquire():
                self.pause()
            try:
                self._follow()
                if name not in self._places:
                    self._create(name, *asked)
            finally:
                self._directory.release()
        offset, *there = self._places[name]
        check_same(name, tuple(there), asked)
        return np.ndarray(*asked, self.memory.mapping, offset)

    def _follow(self) -> None:
        """Read the records that were written since the last time."""
        if self._header[_GENERATION] != self._generation:
            self._forget()
        length = self._header[_LENGTH]
        while self._read < length:
            start = self._log + self._read + _WORD.size
            (nbytes,) = _WORD.unpack_from(self.memory.mapping, start - _WORD.size)
            name, *place = pickle.loads(self.memory.mapping[start : start + nbytes])
            self._note(name, *place)
            self._read += _WORD.size + nbytes

    def _note(self, name: str, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._places[name] = offset, shape, dtype
        stop = offset + math.prod(shape) * dtype.itemsize
        if offset >= self._large:
            self._next_large = _round_up(stop, _PAGE)
        else:
            self._next_small = _round_up(max(stop, offset + 1), _ALIGNMENT)

    def _create(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Allocate an array, then append its record."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _PAGE:
            offset, stop = self._next_small, self._large
        else:
            unit = _HUGE_PAGE if nbytes >= _HUGE_PAGE else _PAGE
            # Huge pages are aligned in the address space, not in the mapping.
            base = self.memory.address
            offset, stop = _round_up(base + self._next_large, unit) - base, self._stop
        record = pickle.dumps((name, offset, shape, dtype), pickle.HIGHEST_PROTOCOL)
        written = self._log + self._read
        after = written + _WORD.size + len(record)
        if offset + nbytes > stop or after > self._end_of_log:
            raise MemoryError(
                f"shared memory: {nbytes} bytes were requested for {name!r}, more than is left of what "
                f"can be addressed for all ranks together; use fewer or smaller arrays, or raise "
                f"'ulimit -v'"
            )
        if nbytes >= _PAGE:
            self.memory.allocate_pages(offset, nbytes)
        self.memory.mapping[written:after] = _WORD.pack(len(record)) + record
        self._header[_LENGTH] = after - self._log
        self._follow()

    def lock(self, index: int) -> Lock:
        """Return the lock with this number, ``0 <= index < N_LOCKS``. It costs nothing until it is used.

        Numbers from ``2**20`` on are reserved for `locks`.
        """
        return Lock(self._file, check_index(index))

    def locks(self, name: str, count: int) -> list[Lock]:
        """Return the locks that all ranks know by this name.

        The number of the first lock is a hash of the name. The probability that any two of a million
        names share locks is one half in a million.
        """
        if count > _BLOCK:
            raise ValueError(f"locks: at most {_BLOCK} have one name, got {count} for {name!r}")
        digest = hashlib.blake2b(name.encode(), digest_size=5).digest()
        first = (1 + int.from_bytes(digest, "little")) * _BLOCK
        return [self.lock(first + number) for number in range(count)]

    def release_locks(self) -> None:
        """Give back all locks that this rank holds, for example after an interrupt."""
        self._file.release_all()

    def close(self) -> None:
        """Close the memory and the file of the locks, at the end of a world."""
        self.memory.close()
        self._header = None  # type: ignore[assignment]
        self._file.close()

    def clear(self) -> None:
        """Forget all arrays, and return their memory to the system.

        Only the master calls it, while no other rank uses an array. Arrays that are still referred to
        become zero.
        """
        if self.memory.is_ours() and self._header[_LENGTH]:
            # If an interrupt comes before the length is 0, the next call does all of it again.
            self._header[_GENERATION] += 1
            self.memory.give_back(self._log, self._stop)
            self._header[_LENGTH] = 0
            self._forget()


class JointNamedMemory(NamedMemory):
    """Named memory that can be joined by a process that was not forked from its creator.

    Its memory and its locks are files without names. A process gets them from the creator, or opens them
    by their paths in ``/proc``.

    Parameters
    ----------
    ranks : int
        As for `SharedMemory`.
    files : sequence of file objects, optional
        The files of the named memory to join: of the memory, and of the locks. By default, new named
        memory is created.
    """

    def __init__(self, ranks: int, files: Sequence[Any] = ()) -> None:
        self.files = files or [open_unnamed(f"synkhronos-{label}") for label in ("memory", "locks")]
        super().__init__(SharedMemory(ranks, self.files[0].fileno()), LockFile(self.files[1]))

    def close(self) -> None:
        super().close()
        self.files[0].close()


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
