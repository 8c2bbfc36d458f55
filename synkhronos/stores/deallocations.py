"""Noting that objects have been deallocated, without running Python code.

A method ``__del__`` may run at any time, and a signal handler may run in it. Python then drops the
exception that the handler raises. The callback of a weak reference here is a method written in C.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Hashable, Iterator


class _Reference(weakref.ref):
    __slots__ = ("key",)

    key: Hashable


class Deallocations:
    """The keys of objects that have been deallocated since they were last asked for."""

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
