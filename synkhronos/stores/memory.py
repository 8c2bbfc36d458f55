"""The shared memory of one machine, and its allocation.

One anonymous shared mapping is created before any worker is forked, so every rank has it at the same
address. It has no name: no file can be left behind in ``/dev/shm``, no other process can open it, and
the small ``/dev/shm`` of containers is not a limit. The mapping is larger than the machine's memory, but
a page is allocated only when it is first written to.

Each rank allocates from its own span, so no lock is needed. Any rank can read and write any array by its
offset. A block is freed when the last array in it is deallocated. Two more spans belong to no rank: the
first is for `named_memory`, the second for another process.
"""

from __future__ import annotations

import bisect
import gc
import mmap
import os
import sys
import weakref
from collections import deque
from threading import get_ident
from types import FrameType
from typing import Any, Hashable, Iterable, Iterator

import numpy as np

from synkhronos._errors import ClosedError, SynkhronosError
from synkhronos.host import heap
from synkhronos.host.handler_errors import is_below, reraise_if_handlers, suppress
from synkhronos.host.machine import cores, memory_room

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_ALIGNMENT = 64
_PAGE = mmap.PAGESIZE
_SMALLEST_SPAN = 16 << 20  # bytes of address space; the minimum for sharing arrays
_KEPT = 256 << 20  # bytes of resident free pages to keep for the next block
RESERVED = _CHECKED = 16 << 20  # bytes between two checks of the available memory, for each rank
_FURTHER = 2  # spans that belong to no rank
_CLOSED = 0  # in place of a process
#: Of the state of a list: its ranges, and the state that has replaced it
RANGES, NEXT = "ranges", "next"


def most_ranks() -> int:
    """Return how many ranks there is memory for; at least one for each core."""
    return max(cores(), _memory_left() // RESERVED - 1)


# Which ranges are free, and whether an exception has interrupted a change


def gaps(ranges: Iterable[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the gaps between some ranges and two bounds, a list of ``(start, stop)``, in order."""
    found = []
    for low, high in [*sorted(ranges), (stop, stop)]:
        if start < min(low, stop):
            found.append((start, min(low, stop)))
        start = max(start, high)
    return found


class FreeList:
    """A list of free memory between two bounds: first fit, with adjacent ranges merged.

    Other threads, signal handlers and finalizers may use it between any two steps of a method, and a
    handler may raise there. So a change makes a new list, and succeeds only if it is the first change of
    the list from which it was made. Otherwise it is tried again.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.lowest, self.end = start, stop
        self._state: dict[str, Any] = {RANGES: [(start, stop)] if start < stop else []}

    def holes(self) -> list[tuple[int, int]]:
        """Return the free ranges, a list of ``(start, stop)``, in order."""
        return list(self.newest()[RANGES])

    def take(self, nbytes: int) -> int | None:
        """Allocate `nbytes` bytes; return their offset, or None if there is no room."""
        while True:
            state = self.newest()
            holes = state[RANGES]
            fitting = (index for index, (low, high) in enumerate(holes) if high - low >= nbytes)
            index = next(fitting, None)
            if index is None:
                return None
            start, stop = holes[index]
            rest = [(start + nbytes, stop)] if stop - start > nbytes else []
            if self._change(state, [*holes[:index], *rest, *holes[index + 1 :]]):
                return start

    def give(self, start: int, nbytes: int) -> None:
        """Free the bytes."""
        while True:
            state = self.newest()
            holes = state[RANGES]
            low, high = start, start + nbytes
            first = last = bisect.bisect(holes, (low,))
            if first > 0 and holes[first - 1][1] == low:
                first -= 1
                low = holes[first][0]
            if last < len(holes) and holes[last][0] == high:
                high = holes[last][1]
                last += 1
            if self._change(state, [*holes[:first], (low, high), *holes[last:]]):
                return

    def cut(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Allocate all that is free between two bounds; return the ranges that were free."""
        while True:
            state = self.newest()
            found, left = [], []
            for low, high in state[RANGES]:
                inside = max(low, start), min(high, stop)
                if inside[0] >= inside[1]:
                    left.append((low, high))
                    continue
                found.append(inside)
                left += [item for item in ((low, inside[0]), (inside[1], high)) if item[0] < item[1]]
            if not found or self._change(state, left):
                return found

    def newest(self) -> dict[str, Any]:
        """Return the state of the list, which has a `NEXT` from the next change on."""
        state = self._state
        while NEXT in state:
            state = state[NEXT]
        return state

    def _change(self, state: dict[str, Any], ranges: list[tuple[int, int]]) -> bool:
        """Let a new list follow another list; return False if that has a follower already."""
        new = {RANGES: ranges}
        if state.setdefault(NEXT, new) is not new:
            return False
        self._state = new
        return True


class Changes:
    """A context manager for each change of some lists.

    Threads and signal handlers may make several changes at the same time.

    Attributes
    ----------
    any_lost : bool
        Whether an exception, such as that of a signal handler, has come in a change.
    """

    def __init__(self) -> None:
        self.any_lost = False
        self._running: dict[FrameType, int] = {}  # the functions with a change, and their threads

    def __enter__(self) -> None:
        self._running[sys._getframe(1)] = get_ident()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.any_lost = True
        self._running.pop(sys._getframe(1), None)

    def forget_interrupted(self) -> None:
        """Forget functions of this thread whose exit was interrupted, which keep what they allocated."""
        if self._running:
            self.is_alone()

    def is_alone(self) -> bool:
        """Whether no change is in progress but that of the calling function."""
        own, alone = sys._getframe(1), True
        for frame, thread in self._running.copy().items():
            if frame is not own:
                # A signal handler runs in the main thread only, which forgets what it has interrupted.
                if thread != get_ident() or is_below(own, frame):
                    alone = False
                else:
                    self._running.pop(frame, None)
        return alone


# The memory


class _Reference(weakref.ref):
    __slots__ = ("key",)

    key: Hashable


class Deallocations:
    """The keys of objects that have been deallocated since they were last asked for.

    No Python code runs when an object is deallocated, as in a method ``__del__``: a signal handler may
    run there, and Python drops the exception that it raises. The callback of a weak reference here is a
    method written in C.
    """

    def __init__(self) -> None:
        # Threads and signal handlers may come between any two steps, so each of them is atomic.
        self._references: dict[int, Any] = {}
        self._ended: deque[Any] = deque()

    def watch(self, item: Any, key: Hashable) -> None:
        """Note the end of an object under this key."""
        reference = _Reference(item, self._ended.append)
        reference.key = key
        self._references[id(reference)] = reference

    @property
    def any_ended(self) -> bool:
        """Whether there may be such keys."""
        return bool(self._ended)

    def __iter__(self) -> Iterator[Any]:
        """Yield the keys of the objects that have ended, each of them once."""
        while self._ended:
            try:
                reference = self._ended.popleft()
            except IndexError:  # another thread has taken the last reference
                return
            if self._references.pop(id(reference), None) is not None:
                yield reference.key

    def living(self) -> list[Any]:
        """Return the keys of the objects that have not ended; forget those that have."""
        for number, reference in self._references.copy().items():
            if reference() is None:
                self._references.pop(number, None)
        return [reference.key for reference in self._references.copy().values()]


class _Block:
    """The owner of a block: the base of the arrays in it. The block is freed with the last of them."""

    __slots__ = ("_mapping", "__array_interface__", "__weakref__")

    def __init__(self, memory: SharedMemory, offset: int, size: int) -> None:
        self._mapping = memory.mapping
        self.__array_interface__ = {
            "data": (memory.address + offset, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


class SharedMemory:
    """The memory shared by the ranks of one world.

    Parameters
    ----------
    ranks : int
        The number of ranks, which have the first spans. This process allocates from span 0 until it
        calls `use_span`. The span `ranks` belongs to the named memory, and the span ``ranks + 1`` is
        free for another process.
    file : int, optional
        The descriptor of a file without a name to map. It is empty, or the memory of another process.

    Attributes
    ----------
    mapping : mmap.mmap
        The memory of all spans.
    address : int
        The address of the mapping in this process.
    """

    def __init__(self, ranks: int, file: int = -1) -> None:
        import psutil  # takes 6 ms, so not at import

        total = psutil.virtual_memory().total
        size = os.fstat(file).st_size if file >= 0 else 0
        if size:
            self.mapping, self._span = mmap.mmap(file, size), size // (ranks + _FURTHER)
        else:
            self.mapping, self._span = _map(1 << (2 * total - 1).bit_length(), ranks, file)
        # A core dump would read every page, and so allocate it, until memory or the disk is full.
        self.mapping.madvise(mmap.MADV_DONTDUMP)
        self.ranks = ranks
        self.address = np.frombuffer(self.mapping, np.uint8, count=1).ctypes.data
        self._end = self.address + self._span * (ranks + _FURTHER)
        room = memory_room()
        self._keep = min(_KEPT, (total if room is None else min(total, room)) // (8 * ranks))
        # Bytes that other ranks and processes may allocate between two checks of the available memory
        self._spare = _CHECKED * (1 + ranks)
        for index in range(ranks + _FURTHER):
            _, start, stop = self.parts_of_span(index)
            with suppress(OSError):  # a kernel without huge pages
                self.mapping.madvise(mmap.MADV_HUGEPAGE, start, stop - start)
        self.use_span(0)

    def parts_of_span(self, index: int) -> tuple[int, int, int]:
        """Return where a span starts, where its part for large blocks starts, and where it ends."""
        start = index * self._span
        return start, start + self._span // 16, start + self._span

    def use_span(self, index: int) -> None:
        """Allocate from this span from now on; the blocks of the former span belong to another rank."""
        self._pid = os.getpid()
        # Separate ranges, so that large blocks start and end at page boundaries.
        start, large, stop = self.parts_of_span(index)
        self._small = FreeList(start + _PAGE, large)
        self._large = FreeList(large, stop)
        self._blocks = Deallocations()  # places of blocks, offset and size
        self._resident = FreeList(large, large)  # the free pages that are resident
        self._changes = Changes()  # of the lists
        self._unchecked = 0

    def is_ours(self) -> bool:
        """Whether this is the process of a rank, and not a process forked from it by the script."""
        return os.getpid() == self._pid

    def check_ours(self) -> None:
        """Raise unless this is the process of a rank."""
        if self._pid == _CLOSED:
            raise ClosedError("these processes were closed, and their shared memory was freed")
        if not self.is_ours():
            raise SynkhronosError(
                "this process was forked from the master, and only the master may allocate shared "
                "memory; call close() and fork() here to start separate processes"
            )

    def close(self) -> None:
        """Allocate nothing more. The memory is unmapped when no array is left in it, perhaps now."""
        self._pid = _CLOSED
        self._end = self.address
        self.mapping = None  # type: ignore[assignment]

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return a 1-d ``uint8`` array of new, uninitialized shared memory."""
        self.check_ours()
        size = nbytes
        unit = _ALIGNMENT if nbytes < _PAGE else _PAGE
        nbytes = max(unit, -(-nbytes // unit) * unit)
        self.collect()
        with self._changes:
            offset = (self._small if unit < _PAGE else self._large).take(nbytes)
            if offset is not None:
                block = _Block(self, offset, size)
                self._blocks.watch(block, (offset, nbytes))
        if offset is None:
            raise MemoryError(
                f"shared memory: {nbytes} bytes were requested, more than is free of the {self._span} "
                f"that one rank can address; free some Data or raise 'ulimit -v'"
            )
        array = np.asarray(block)
        if _length(self._resident.cut(offset, offset + nbytes)) < nbytes:
            self._unchecked += nbytes
            if self._unchecked >= _CHECKED:
                self._unchecked = 0
                self.allocate_pages(offset, nbytes)
        return array

    def collect(self) -> None:
        """Free the blocks of deallocated arrays; keep the pages of some for the next blocks."""
        self._changes.forget_interrupted()
        if self._blocks.any_ended:
            with self._changes:
                for offset, nbytes in self._blocks:
                    self._free(offset, nbytes)
        if self._changes.any_lost:
            self._find_lost()

    def _free(self, offset: int, nbytes: int) -> None:
        if offset < self._large.lowest:
            self._small.give(offset, nbytes)
            return
        # The block is freed last: other threads may allocate it at once.
        self._resident.cut(offset, offset + nbytes)  # remains of a change that an exception interrupted
        if _length(self._resident.holes()) + nbytes > self._keep:
            self.give_back(offset, offset + nbytes)
        else:
            self._resident.give(offset, nbytes)
        self._large.give(offset, nbytes)

    def _find_lost(self) -> None:
        """Free ranges that are neither free nor in use, after a signal handler has raised in a change.

        While another thread changes the lists, this is left to a later call.
        """
        with self._changes:
            lists = self._small, self._large
            states = [item.newest() for item in lists]
            if not self._changes.is_alone():
                return
            used = [(offset, offset + nbytes) for offset, nbytes in self._blocks.living()]
            # A change that has begun since then is either in progress or has replaced a list.
            if not self._changes.is_alone() or any(NEXT in state for state in states):
                return
            self._changes.any_lost = False
            for item, state in zip(lists, states):
                for start, stop in gaps([*state[RANGES], *used], item.lowest, item.end):
                    if item is self._large:
                        self.give_back(start, stop)
                        self._resident.cut(start, stop)
                    item.give(start, stop - start)

    def trim(self) -> None:
        """Like `collect`, but return all free pages to the system."""
        if not self.is_ours():
            return
        self.collect()
        for resident in self._resident.holes():
            with self._changes:
                # Other threads must not allocate the pages that are returned.
                for start, stop in self._large.cut(*resident):
                    try:
                        self.give_back(start, stop)
                        self._resident.cut(start, stop)
                    finally:
                        self._large.give(start, stop - start)

    def trim_others(self) -> None:
        """Return the pages of all other processes to the system, after they have ended.

        The span of the named memory belongs to no process.
        """
        if not self.is_ours():
            return
        for index in range(self.ranks + _FURTHER):
            start, _, stop = self.parts_of_span(index)
            if index != self.ranks and not start <= self._large.lowest < stop:
                self.give_back(start, stop)

    def give_back(self, start: int, stop: int) -> None:
        """Return pages to the system; their contents become zero."""
        self.mapping.madvise(mmap.MADV_REMOVE, start, stop - start)

    def allocate_pages(self, offset: int, nbytes: int) -> None:
        """Allocate the pages of a block now, or raise ``MemoryError`` if there is too little memory.

        The kernel grants more memory than is available, and kills a process that writes to it. If the
        pages of large blocks are allocated immediately, the reported available memory is correct, even
        if several ranks allocate at the same time.
        """
        self._require(nbytes, nbytes)
        for start in range(offset, offset + nbytes, _CHECKED):
            stop = min(start + _CHECKED, offset + nbytes)
            self._require(stop - start, nbytes)
            np.frombuffer(self.mapping, np.uint8, stop - start, start)[::_PAGE] = 0

    def _require(self, nbytes: int, of: int) -> None:
        """Raise ``MemoryError`` unless this many bytes are available, for a block of `of` bytes."""
        left = _memory_left() - self._spare
        if nbytes > left:
            self.trim()
            heap.trim()
            left = _memory_left() - self._spare
        if nbytes > left:
            raise _too_little(of, left)

    def __contains__(self, array: np.ndarray) -> bool:
        """Whether a C-contiguous array is in this memory."""
        return array.flags.c_contiguous and self.address <= array.ctypes.data < self._end

    def offset(self, array: np.ndarray) -> int:
        """Return the offset of an array in this memory."""
        return array.ctypes.data - self.address


def _map(span: int, ranks: int, file: int) -> tuple[mmap.mmap, int]:
    """Return a mapping of the spans, and the size of a span: the requested size, or less."""
    flags = mmap.MAP_SHARED | _NORESERVE | (mmap.MAP_ANONYMOUS if file < 0 else 0)
    limited = collected = False
    while True:
        try:
            if file >= 0:
                os.ftruncate(file, span * (ranks + _FURTHER))
            mapping = mmap.mmap(file, span * (ranks + _FURTHER), flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            reraise_if_handlers(error)
            # A limit on address space (ulimit -v, strict overcommit)
            if not collected:  # the memory of former processes may be garbage
                gc.collect()
                collected = True
                continue
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
        # Not all of it: stacks, libraries and arrays need address space, too.
        mapping.close()
        span, limited = max(span // 2, _SMALLEST_SPAN), False


def _length(ranges: Iterable[tuple[int, int]]) -> int:
    return sum([stop - start for start, stop in ranges])


def check_memory(nbytes: int) -> None:
    """Raise ``MemoryError`` unless this many bytes are available, and some to spare."""
    left = _memory_left() - _CHECKED
    if nbytes > left:
        raise _too_little(nbytes, left)


def _too_little(nbytes: int, left: int) -> MemoryError:
    return MemoryError(
        f"shared memory: {nbytes} bytes were requested, {max(left, 0)} are left on this machine or in "
        f"this container; use a smaller array or a numpy.memmap, free some Data, or raise the "
        f"container's memory limit ('docker run --memory')"
    )


def _memory_left() -> int:
    import psutil

    try:
        left, room = psutil.virtual_memory().available, memory_room()
    except OSError as error:  # too many open files: the number is unknown
        reraise_if_handlers(error)
        return sys.maxsize
    return left if room is None else min(left, room)
