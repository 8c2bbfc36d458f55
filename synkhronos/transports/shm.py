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
import mmap
from typing import Sequence

import numpy as np

from synkhronos._machine import memory_room
from synkhronos._typing import DTypeLike, Reference

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_ALIGNMENT = 64
_PAGE = mmap.PAGESIZE
_KEPT = 256 << 20  # bytes of freed pages that are kept, warm, for the next block
_CHECKED = 16 << 20  # blocks from this size on are checked against the memory that is left


class FreeList:
    """Offsets of free memory between two bounds: first fit, neighbours merged."""

    def __init__(self, start: int, stop: int) -> None:
        self.lowest = start
        self._starts, self._stops = [start], [stop]

    def holes(self) -> list[tuple[int, int]]:
        """Return a list of ``(start, stop)``, in order."""
        return list(zip(self._starts, self._stops))

    def take(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` free bytes, or None."""
        for index, start in enumerate(self._starts):
            if self._stops[index] - start >= nbytes:
                if self._stops[index] - start == nbytes:
                    del self._starts[index], self._stops[index]
                else:
                    self._starts[index] = start + nbytes
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Make the bytes free again."""
        stop = start + nbytes
        index = bisect.bisect(self._starts, start)
        joins_left = index > 0 and self._stops[index - 1] == start
        joins_right = index < len(self._starts) and self._starts[index] == stop
        if joins_left and joins_right:
            self._stops[index - 1] = self._stops[index]
            del self._starts[index], self._stops[index]
        elif joins_left:
            self._stops[index - 1] = stop
        elif joins_right:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._stops.insert(index, stop)


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

        span = 1 << (2 * psutil.virtual_memory().total - 1).bit_length()
        while True:
            try:
                self.mapping = mmap.mmap(
                    -1, span * ranks, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE
                )
                break
            except (OSError, ValueError, OverflowError):
                # A limit on address space (ulimit -v, strict overcommit): take what there is.
                span //= 2
                if span < 1 << 20:
                    raise
        self.ranks = ranks
        self._span = span
        self.address = np.frombuffer(self.mapping, np.uint8, count=1).ctypes.data
        self._end = self.address + span * ranks
        self.use_span(0)

    def use_span(self, index: int) -> None:
        """Allocate from this span from now on; blocks of the former one are another rank's."""
        start, stop = index * self._span, (index + 1) * self._span
        # Apart, so that large blocks begin and end with a page.
        self._small = FreeList(start, start + self._span // 16)
        self._large = FreeList(start + self._span // 16, stop)
        self._returned: collections.deque = collections.deque()
        self._kept = 0

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return a 1-d ``uint8`` array of new shared memory, not cleared."""
        size = nbytes
        unit = _ALIGNMENT if nbytes < _PAGE else _PAGE
        nbytes = max(unit, -(-nbytes // unit) * unit)
        self.collect()
        if nbytes >= _CHECKED:
            _check_memory_left(nbytes)
        offset = (self._small if unit < _PAGE else self._large).take(nbytes)
        if offset is None:
            raise MemoryError(
                f"shared memory: {nbytes} bytes were asked for, more than is left of the "
                f"{self._span} that one rank may address; free some Data or raise 'ulimit -v'"
            )
        self._kept = max(0, self._kept - nbytes)
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
            self._kept += nbytes
            if self._kept > _KEPT:
                self.mapping.madvise(mmap.MADV_REMOVE, offset, nbytes)
                self._kept -= nbytes

    def trim(self) -> None:
        """As `collect`, and give all pages that are free back to the system."""
        self.collect()
        for start, stop in self._large.holes():
            self.mapping.madvise(mmap.MADV_REMOVE, start, stop - start)
        self._kept = 0

    def trim_others(self) -> None:
        """Give back the pages of all other ranks, once these have ended."""
        for start in range(0, self._end - self.address, self._span):
            if not start <= self._large.lowest < start + self._span:
                self.mapping.madvise(mmap.MADV_REMOVE, start, self._span)

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


def _check_memory_left(nbytes):
    import psutil

    left, room = psutil.virtual_memory().available, memory_room()
    if room is not None:
        left = min(left, room)
    if nbytes > left:
        raise MemoryError(
            f"shared memory: {nbytes} bytes were asked for, {left} are left on this machine (or in "
            f"this container: raise its memory limit); use a smaller array, or a numpy.memmap"
        )
