"""Memory that all ranks share.

One anonymous shared mapping is made before any worker is forked, so that every rank sees it at the
same address. It has no name: nothing can be left behind in ``/dev/shm``, nobody else can open it, and
the small ``/dev/shm`` of containers is no limit. The mapping is larger than the machine's memory, but
a page exists only once it is written to.

Each rank allocates from a span of its own, so no lock is needed; any rank reads and writes any array
through its reference ``(offset, shape, dtype)``. A block lives as long as an array in it does.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import mmap
import os
import sys
from typing import Sequence

import numpy as np

from synkhronos._errors import SynkhronosError
from synkhronos._typing import DTypeLike, Reference
from synkhronos.host.machine import memory_room

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_ALIGNMENT = 64
_PAGE = mmap.PAGESIZE
_LEAST_SPAN = 16 << 20  # bytes of address space without which nothing can be done
_KEPT = 256 << 20  # bytes of freed pages that are kept, warm, for the next block
_CHECKED = 16 << 20  # at each so many bytes it is looked at how much memory is left
_SPARE = 2 * _CHECKED  # what has to stay, for what is taken between two looks


class FreeList:
    """Offsets of free memory between two bounds: first fit, neighbours merged."""

    def __init__(self, start: int, stop: int) -> None:
        self.lowest = start
        # A signal handler may raise between any two steps, so each change of the list is one step.
        self._holes = [(start, stop)]

    def holes(self) -> list[tuple[int, int]]:
        """Return a list of ``(start, stop)``, in order."""
        return list(self._holes)

    def take(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` free bytes, or None."""
        for index, (start, stop) in enumerate(self._holes):
            if stop - start > nbytes:
                self._holes[index] = start + nbytes, stop
                return start
            if stop - start == nbytes:
                del self._holes[index]
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Make the bytes free again."""
        stop = start + nbytes
        first = last = bisect.bisect(self._holes, (start,))
        if first > 0 and self._holes[first - 1][1] == start:
            first -= 1
            start = self._holes[first][0]
        if last < len(self._holes) and self._holes[last][0] == stop:
            stop = self._holes[last][1]
            last += 1
        self._holes[first:last] = [(start, stop)]


class _Block:
    """Owner of an allocation: the base of the arrays in it; gives it back when the last one dies."""

    __slots__ = ("_returned", "_place", "_mapping", "__array_interface__")

    def __init__(self, memory, offset, nbytes, size):
        self._returned = memory._returned
        self._place = (offset, nbytes)
        self._mapping = memory.mapping
        self.__array_interface__ = {
            "data": (memory.address + offset, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self):
        # May run at any moment, also inside `allocate`: so it only leaves a note.
        self._returned.append(self._place)


class SharedMemory:
    """The memory shared by the ranks of one world.

    Parameters
    ----------
    ranks : int
        How many spans it has; this process allocates from span `rank`, at first 0.
    """

    def __init__(self, ranks: int) -> None:
        import psutil  # takes 6 ms, and is not needed by an import of this package

        total = psutil.virtual_memory().total
        self.mapping, self._span = _map(1 << (2 * total - 1).bit_length(), ranks)
        if hasattr(mmap, "MADV_DONTDUMP"):
            # A core dump would touch every page, those too that do not exist yet, until the memory
            # or the disk is full.
            self.mapping.madvise(mmap.MADV_DONTDUMP)
        self.ranks = ranks
        self.address = np.frombuffer(self.mapping, np.uint8, count=1).ctypes.data
        self._end = self.address + self._span * ranks
        room = memory_room()
        self._keep = min(_KEPT, (total if room is None else min(total, room)) // (8 * ranks))
        # At the start of each span: the block that its rank has taken last, (offset, nbytes).
        self._taken = np.ndarray((ranks, 2), "int64", self.mapping, 0, (self._span, 8))
        self.use_span(0)

    def use_span(self, index: int) -> None:
        """Allocate from this span from now on; blocks of the former one are another rank's."""
        self._pid = os.getpid()
        self._index = index
        start, stop = index * self._span + _PAGE, (index + 1) * self._span
        # Apart, so that large blocks begin and end with a page.
        self._small = FreeList(start, start + self._span // 16)
        self._large = FreeList(start + self._span // 16, stop)
        self._returned: collections.deque = collections.deque()
        self._kept = self._unchecked = 0

    def is_ours(self) -> bool:
        """Whether this is the process of a rank, and not one that the script has forked from it."""
        return os.getpid() == self._pid

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return a 1-d ``uint8`` array of new shared memory, not cleared."""
        if not self.is_ours():
            raise SynkhronosError(
                "this process was forked from the master, and only that one may take shared memory; "
                "call close() and fork() here for processes of its own"
            )
        size = nbytes
        unit = _ALIGNMENT if nbytes < _PAGE else _PAGE
        nbytes = max(unit, -(-nbytes // unit) * unit)
        self.collect()
        self._unchecked += nbytes
        checked = self._unchecked >= _CHECKED
        if checked:
            self._check_memory_left(nbytes)
        offset = (self._small if unit < _PAGE else self._large).take(nbytes)
        if offset is None:
            self._taken[self._index] = 0
            raise MemoryError(
                f"shared memory: {nbytes} bytes were asked for, more than is left of the "
                f"{self._span} that one rank may address; free some Data or raise 'ulimit -v'"
            )
        self._kept = max(0, self._kept - nbytes)
        if checked:
            self._taken[self._index, 0] = offset
        return np.asarray(_Block(self, offset, nbytes, size))

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        """Return a new array in shared memory, not cleared."""
        dtype = np.dtype(dtype)
        size = 1
        for extent in shape:
            size *= extent
        return self.allocate(size * dtype.itemsize).view(dtype).reshape(shape)

    def collect(self) -> None:
        """Make the blocks whose arrays died free again; keep some of their pages for the next."""
        while self._returned:
            offset, nbytes = self._returned.popleft()
            if offset < self._large.lowest:
                self._small.give(offset, nbytes)
                continue
            self._large.give(offset, nbytes)
            if self._taken[self._index, 0] == offset:
                self._taken[self._index] = 0
            self._kept += nbytes
            if self._kept > self._keep:
                self.mapping.madvise(mmap.MADV_REMOVE, offset, nbytes)
                self._kept -= nbytes

    def trim(self) -> None:
        """As `collect`, and give all pages that are free back to the system."""
        if not self.is_ours():
            return
        self.collect()
        for start, stop in self._large.holes():
            self.mapping.madvise(mmap.MADV_REMOVE, start, stop - start)
        self._kept = 0

    def trim_others(self) -> None:
        """Give back the pages of all other ranks, once these have ended."""
        if not self.is_ours():
            return
        for start in range(0, self._end - self.address, self._span):
            if not start <= self._large.lowest < start + self._span:
                self.mapping.madvise(mmap.MADV_REMOVE, start, self._span)

    def _check_memory_left(self, nbytes):
        """Raise if the pages of a new block could not all be written to.

        What other processes have taken and not yet written to counts: the system does not know of it,
        and would kill one of the ranks when it comes to that.
        """
        self._unchecked = 0
        own = self._taken[self._index]
        unwritten = self._unwritten(*own.tolist())
        own[:] = 0, nbytes  # before the others' are read: of two at once, one sees the other
        for rank, (offset, taken) in enumerate(self._taken.tolist()):
            if rank != self._index:
                unwritten += self._unwritten(offset, taken)
        left = _memory_left() - unwritten - _SPARE
        if nbytes > left:
            self.trim()
            left = _memory_left() - unwritten - _SPARE
        if nbytes > left:
            own[1] = 0
            raise MemoryError(
                f"shared memory: {nbytes} bytes were asked for, {max(left, 0)} are left on this machine "
                f"or in this container; use a smaller array or a numpy.memmap, free some Data, or raise "
                f"the container's memory limit ('docker run --memory')"
            )

    def _unwritten(self, offset, nbytes):
        """Return how many bytes of a block have no memory yet; at 0 it is only asked for."""
        if not offset or not nbytes:
            return nbytes
        pages = np.zeros(-(-nbytes // _PAGE), np.uint8)
        ctypes.CDLL(None).mincore(
            ctypes.c_void_p(self.address + offset),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(pages.ctypes.data),
        )
        return nbytes - int((pages & 1).sum(dtype=np.int64)) * _PAGE

    def __contains__(self, array: np.ndarray) -> bool:
        """Whether a C-contiguous array lies in this memory."""
        return array.flags.c_contiguous and self.address <= array.ctypes.data < self._end

    def reference(self, array: np.ndarray) -> Reference:
        """Return what another rank needs to `open` a C-contiguous array of this memory."""
        return array.ctypes.data - self.address, array.shape, array.dtype.str

    def place(self, array: np.ndarray) -> np.ndarray:
        """Return `array` itself if it lies in this memory, else a copy that does."""
        if array in self:
            return array
        placed = self.empty(array.shape, array.dtype)
        placed[...] = array
        return placed

    def open(self, reference: Reference) -> np.ndarray:
        """Return the array of a reference, without a copy."""
        offset, shape, dtype = reference
        return np.ndarray(shape, dtype, self.mapping, offset)


def _map(span, ranks):
    """Return a mapping of `ranks` spans, and what a span is: the one asked for, or what there is."""
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE
    limited = False
    while True:
        try:
            mapping = mmap.mmap(-1, span * ranks, flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            # A limit on address space (ulimit -v, strict overcommit)
            span //= 2
            limited = True
            if span < _LEAST_SPAN:
                raise MemoryError(
                    f"fork(): no address space is left for {_LEAST_SPAN} bytes of shared memory for "
                    f"each of {ranks} processes; raise 'ulimit -v', or use fewer processes"
                ) from error
            continue
        if not limited:
            return mapping, span
        # All that there is would leave too little for stacks, libraries and arrays.
        mapping.close()
        span, limited = max(span // 2, _LEAST_SPAN), False


def _memory_left():
    import psutil

    try:
        left, room = psutil.virtual_memory().available, memory_room()
    except OSError:  # too many open files: nobody can tell
        return sys.maxsize
    return left if room is None else min(left, room)
