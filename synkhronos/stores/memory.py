"""The shared memory of one machine, and how it is allocated.

One anonymous shared mapping is made before any worker is forked, so that every rank sees it at the
same address. It has no name: no file can be left behind in ``/dev/shm``, nobody else can open it, and
the small ``/dev/shm`` of containers is no limit. The mapping is larger than the machine's memory, but a
page is allocated only when it is first written to.

Each rank allocates from a span of its own, so no lock is needed; any rank reads and writes any array by
its offset. A block lives as long as an array in it does.
"""

from __future__ import annotations

import bisect
import collections
import mmap
import os
import sys

import numpy as np

from synkhronos._errors import SynkhronosError
from synkhronos.host import heap
from synkhronos.host.machine import memory_room

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_ALIGNMENT = 64
_PAGE = mmap.PAGESIZE
_SMALLEST_SPAN = 16 << 20  # bytes of address space without which no array can be shared
_KEPT = 256 << 20  # bytes of resident free pages that are kept for the next block
_CHECKED = 16 << 20  # the memory that is left is checked for each so many bytes


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
    """Owner of an allocation: the base of the arrays in it. It is returned when the last one dies."""

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
        # May run at any moment, also inside `allocate`: `collect` does the rest.
        self._returned.append(self._place)


class SharedMemory:
    """The memory shared by the ranks of one world.

    Parameters
    ----------
    ranks : int
        How many spans it has. This process allocates from span 0 until `use_span` names another.

    Attributes
    ----------
    mapping : mmap.mmap
    address : int
        Where the mapping begins in this process.
    """

    def __init__(self, ranks: int) -> None:
        import psutil  # takes 6 ms, and is not needed by an import of this package

        total = psutil.virtual_memory().total
        self.mapping, self._span = _map(1 << (2 * total - 1).bit_length(), ranks)
        if hasattr(mmap, "MADV_DONTDUMP"):
            # A core dump would touch every page, and so allocate it, until memory or disk is full.
            self.mapping.madvise(mmap.MADV_DONTDUMP)
        self.ranks = ranks
        self.address = np.frombuffer(self.mapping, np.uint8, count=1).ctypes.data
        self._end = self.address + self._span * ranks
        room = memory_room()
        self._keep = min(_KEPT, (total if room is None else min(total, room)) // (8 * ranks))
        # What other ranks and processes may take between two checks of the memory that is left.
        self._spare = _CHECKED * (1 + ranks)
        for index in range(ranks):
            start, stop = self._large_part(index)
            heap.advise_huge_pages(self.address + start, stop - start)
        self.use_span(0)

    def _large_part(self, index):
        """Return where blocks of a page and more are in a span."""
        return index * self._span + self._span // 16, (index + 1) * self._span

    def use_span(self, index: int) -> None:
        """Allocate from this span from now on; blocks of the former one are another rank's."""
        self._pid = os.getpid()
        start, stop = self._large_part(index)
        # Apart, so that large blocks begin and end with a page.
        self._small = FreeList(index * self._span + _PAGE, start)
        self._large = FreeList(start, stop)
        self._returned: collections.deque = collections.deque()
        self._resident: dict[int, int] = {}  # free blocks whose pages are kept: bytes by offset
        self._unchecked = 0

    def is_ours(self) -> bool:
        """Whether this is the process of a rank, and not one that the script has forked from it."""
        return os.getpid() == self._pid

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return a 1-d ``uint8`` array of new shared memory, uninitialised."""
        if not self.is_ours():
            raise SynkhronosError(
                "this process was forked from the master, and only the master may allocate shared "
                "memory; call close() and fork() here for processes of its own"
            )
        size = nbytes
        unit = _ALIGNMENT if nbytes < _PAGE else _PAGE
        nbytes = max(unit, -(-nbytes // unit) * unit)
        self.collect()
        offset = (self._small if unit < _PAGE else self._large).take(nbytes)
        if offset is None:
            raise MemoryError(
                f"shared memory: {nbytes} bytes were requested, more than is left of the {self._span} "
                f"that one rank can address; free some Data or raise 'ulimit -v'"
            )
        block = np.asarray(_Block(self, offset, nbytes, size))
        if self._resident.pop(offset, 0) < nbytes:
            self._unchecked += nbytes
            if self._unchecked >= _CHECKED:
                self._unchecked = 0
                self._allocate_pages(offset, nbytes)
        return block

    def collect(self) -> None:
        """Make the blocks whose arrays died free again; keep the pages of some for the next."""
        while self._returned:
            offset, nbytes = self._returned.popleft()
            if offset < self._large.lowest:
                self._small.give(offset, nbytes)
                continue
            self._large.give(offset, nbytes)
            if sum(self._resident.values()) + nbytes > self._keep:
                self.mapping.madvise(mmap.MADV_REMOVE, offset, nbytes)
            else:
                self._resident[offset] = nbytes

    def trim(self) -> None:
        """Do as `collect`, and return all free pages to the system."""
        if not self.is_ours():
            return
        self.collect()
        self._resident.clear()
        for start, stop in self._large.holes():
            self.mapping.madvise(mmap.MADV_REMOVE, start, stop - start)

    def trim_others(self) -> None:
        """Return the pages of all other ranks to the system, once these have ended."""
        if not self.is_ours():
            return
        for start in range(0, self._end - self.address, self._span):
            if not start <= self._large.lowest < start + self._span:
                self.mapping.madvise(mmap.MADV_REMOVE, start, self._span)

    def _allocate_pages(self, offset, nbytes):
        """Allocate the pages of a block now, or raise ``MemoryError`` if there is too little memory.

        The kernel hands out more memory than there is, and kills a process that writes to it. With
        the pages of large blocks allocated at once, the memory that is left is what it looks like,
        also when several ranks allocate at the same time.
        """
        self._require(nbytes, nbytes)
        for start in range(offset, offset + nbytes, _CHECKED):
            stop = min(start + _CHECKED, offset + nbytes)
            self._require(stop - start, nbytes)
            np.frombuffer(self.mapping, np.uint8, stop - start, start)[::_PAGE] = 0

    def _require(self, nbytes, of):
        """Raise ``MemoryError`` unless so many bytes are left, for a block of `of` bytes."""
        left = _memory_left() - self._spare
        if nbytes > left:
            self.trim()
            heap.trim()
            left = _memory_left() - self._spare
        if nbytes > left:
            raise MemoryError(
                f"shared memory: {of} bytes were requested, {max(left, 0)} are left on this machine or "
                f"in this container; use a smaller array or a numpy.memmap, free some Data, or raise "
                f"the container's memory limit ('docker run --memory')"
            )

    def __contains__(self, array: np.ndarray) -> bool:
        """Whether a C-contiguous array is in this memory."""
        return array.flags.c_contiguous and self.address <= array.ctypes.data < self._end

    def offset(self, array: np.ndarray) -> int:
        """Return where an array of this memory begins."""
        return array.ctypes.data - self.address


def _map(span, ranks):
    """Return a mapping of `ranks` spans, and the size of a span: the one asked for, or less."""
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE
    limited = False
    while True:
        try:
            mapping = mmap.mmap(-1, span * ranks, flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            # A limit on address space (ulimit -v, strict overcommit)
            span //= 2
            limited = True
            if span < _SMALLEST_SPAN:
                raise MemoryError(
                    f"fork(): no address space is left for {_SMALLEST_SPAN} bytes of shared memory for "
                    f"each of {ranks} processes; raise 'ulimit -v', or use fewer processes"
                ) from error
            continue
        if not limited:
            return mapping, span
        # All that there is would leave too little for stacks, libraries and arrays.
        mapping.close()
        span, limited = max(span // 2, _SMALLEST_SPAN), False


def _memory_left():
    import psutil

    try:
        left, room = psutil.virtual_memory().available, memory_room()
    except OSError:  # too many open files: it cannot be known
        return sys.maxsize
    return left if room is None else min(left, room)
