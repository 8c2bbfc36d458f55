"""Memory in pieces, the stripes, each of which changes at once, even if a rank is killed meanwhile.

A rank that changes a stripe holds its lock, but may be killed in the middle. So it writes the new
contents to other memory, its spare, and then enters the spare into a table in the place of the old
memory, which becomes its next spare. What it wrote counts from this one store on. The old memory was
read just before and is in the cache, so writing to it next costs no more than writing in place.

Each memory is either in the table or the spare of one *member*. A member is a number that a rank has by
a lock; after its death or the end of its program, the number and the spare pass to the next rank. A rank
may die between the store in the table and the store of its next spare. Then its spare is the memory in
the table. Whoever holds the lock of the stripe next, or has the member's number, finishes this: the
spare is what was there before.
"""

from __future__ import annotations

from typing import Callable

import numpy as np

from synkhronos.stores.commons import Commons, Lock

_MEMBERS = 1024  # ranks that may have stripes of one name at once
_READY, _LAYOUT = 0, 1  # words of the header: whether it is complete, the length of the layout
_SPARE, _FORMER, _STRIPE = 0, 1, 2  # words of a member. Memories and members are numbered from 1.
_MEMORY, _LAST = 0, 1  # words of a stripe: its memory, the member that changed it last
_SPREAD = 0.618034  # of a cycle, between the places where members start


class Stripes:
    """The stripes of one name, for one rank.

    Parameters
    ----------
    commons : Commons
    name : str
    layout : bytes
        Describes the contents. The first rank writes it.
    check : callable
        ``check(layout)`` is called with the first rank's bytes; it raises if they do not fit.
    count, nbytes : int
        The number of stripes, and the bytes of each.
    fill : callable
        ``fill(number, memory)`` is called by the first rank, to write a stripe for the first time.
    pause : callable
        Called when other ranks hold all the locks of interest. It sleeps; if it raises, no lock is held.

    Attributes
    ----------
    is_first : bool
        Whether this rank has called `fill`.
    """

    def __init__(
        self,
        commons: Commons,
        name: str,
        layout: bytes,
        check: Callable[[bytes], None],
        count: int,
        nbytes: int,
        fill: Callable[[int, np.ndarray], None],
        pause: Callable[[], None],
    ) -> None:
        self._commons, self._name, self._pause = commons, name, pause
        self._count, self._nbytes = count, nbytes
        self._layout = layout
        first, *self._locks = commons.locks(name, 1 + count)
        self._acquire(first)
        try:
            self.is_first = self._begin(check, fill)
        finally:
            first.release()
        self._become_member()

    def _begin(self, check, fill):
        """Fill the stripes if no rank has done so to the end."""
        header = self._array("", 2, "int64").data
        if header[_READY]:
            check(self._describe(header[_LAYOUT]).tobytes())
            self._open()
            return False
        header[_LAYOUT] = len(self._layout)
        described = self._describe(len(self._layout))
        described[...] = np.frombuffer(self._layout, np.uint8)
        self._open()
        for number in range(self._count):
            fill(number, self._memories[number])
            self._table[number, _MEMORY] = 1 + number
        header[_READY] = 1
        return True

    def _describe(self, length):
        return self._array(f"layout of {length} bytes", length, "uint8")

    def _open(self):
        shape = self._count, self._nbytes
        self._memories = list(self._array("{} x {}".format(*shape), shape, "uint8"))
        self._table = self._array(f"table of {self._count}", (self._count, 2), "int64").data
        self._members = self._array("members", (_MEMBERS, 3), "int64").data

    def _array(self, part, shape, dtype):
        return self._commons.array(f"{self._name} {part}".rstrip(), shape, dtype)

    def _become_member(self):
        locks = enumerate(self._commons.locks(f"{self._name} members", _MEMBERS))
        for self._member, self._own in locks:
            if self._own.try_acquire():
                break
        else:
            raise RuntimeError(f"{self._name}: at most {_MEMBERS} ranks can use it at once")
        if self._members[self._member, _SPARE] and self._count:
            former = self._members[self._member, _STRIPE]
            self._acquire(self._locks[former])
            try:
                self._finish(former)
            finally:
                self._locks[former].release()
        else:
            self._members[self._member, _SPARE] = 1 + self._count + self._member
        start = int(self._member * _SPREAD % 1 * self._count)
        self._order = [*range(start, self._count), *range(start)]

    def read(self, work: Callable[[int, np.ndarray], None]) -> None:
        """Call ``work(number, memory)`` for each stripe, under its lock."""

        def visit(number):
            self._finish(number)
            work(number, self._memory(self._table[number, _MEMORY]))

        self._visit(visit)

    def change(self, work: Callable[[int, np.ndarray, np.ndarray], None]) -> None:
        """Call ``work(number, memory, new)`` for each stripe, under its lock. It writes all of `new`."""
        table, members, own = self._table, self._members, self._member

        def visit(number):
            self._finish(number)
            former, spare = table[number, _MEMORY], members[own, _SPARE]
            work(number, self._memory(former), self._memory(spare))
            members[own, _FORMER], members[own, _STRIPE] = former, number
            table[number, _LAST] = 1 + own
            table[number, _MEMORY] = spare  # from here on, the stripe is changed
            members[own, _SPARE] = former

        self._visit(visit)

    def _finish(self, number):
        """Finish the last change of a stripe, if its member died before the end."""
        last = self._table[number, _LAST] - 1
        if last >= 0 and self._members[last, _SPARE] == self._table[number, _MEMORY]:
            self._members[last, _SPARE] = self._members[last, _FORMER]

    def _memory(self, number):
        """Return a memory by its number: first those of the stripes, then one for each member."""
        while number > len(self._memories):
            spare = f"spare {len(self._memories) - self._count} of {self._nbytes} bytes"
            self._memories.append(self._array(spare, self._nbytes, "uint8"))
        return self._memories[number - 1]

    def _visit(self, visit):
        """Call ``visit(number)`` for each stripe, under its lock; those that are busy come last."""
        waiting = self._order
        while waiting:
            busy = []
            for number in waiting:
                lock = self._locks[number]
                if lock.try_acquire():
                    try:
                        visit(number)
                    finally:
                        lock.release()
                else:
                    busy.append(number)
            if len(busy) == len(waiting):
                self._pause()
            waiting = busy

    def _acquire(self, lock: Lock) -> None:
        while not lock.try_acquire():
            self._pause()
