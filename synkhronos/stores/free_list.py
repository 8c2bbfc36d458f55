"""Which ranges of a memory are free, and whether an exception has interrupted a change."""

from __future__ import annotations

import bisect
import sys
from threading import get_ident
from types import FrameType
from typing import Any, Iterable

from synkhronos.host.handler_errors import is_below

#: Of the state of a list: its ranges, and the state that has replaced it
RANGES, NEXT = "ranges", "next"


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
