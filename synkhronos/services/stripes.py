"""Memory in pieces called stripes. Each stripe changes atomically, even if a rank is killed meanwhile.

A rank that changes a stripe holds its lock, but may be killed in the middle. So it writes the new
contents to separate memory, its spare. Then it replaces the old memory by the spare in a table, and the
old memory becomes its next spare. This single store makes the change effective. The old memory was read
just before and is in the cache, so writing to it next costs no more than writing in place.

Each memory is either in the table or the spare of one *member*. A member is a number that a rank owns by
holding a lock. After its death or the end of its program, the number and the spare pass to the next
rank. A rank may die between the store in the table and the store of its next spare. Then its spare is
the memory in the table. The next rank that holds the lock of the stripe or has the member's number
completes the change: the spare is the previous memory.

Stripes on another machine are visited through the progress processes. A rank writes its request to a
channel, and the new contents of a stripe to memory beside it. The progress process of its machine sends
both to the progress process of the center's machine, which visits the stripe for the rank and sends back
its contents. While the rank computes, the progress process there holds the lock of the stripe. The
request that stores a stripe also takes the next one, so that there is one round trip for each.
"""

from __future__ import annotations

import pickle
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from synkhronos.services.registers import Channel, wakeup_semaphores
from synkhronos.stores.named_memory import Lock, NamedMemory

_MEMBERS = 1024  # ranks that may have stripes of one name at once
_READY, _LAYOUT = 0, 1  # words of the header: whether it is complete, the length of the layout
_SPARE, _FORMER, _STRIPE = 0, 1, 2  # words of a member. Memories and members are numbered from 1.
_MEMORY, _LAST = 0, 1  # words of a stripe: its memory, the member that changed it last
_SPREAD = 0.618034  # the part of a cycle between the places where members start
_AWAKE = 0.1  # seconds between two checks of a rank that waits for another machine


class Stripes:
    """The stripes of one name, for one rank.

    Parameters
    ----------
    named_memory : NamedMemory
        Where the stripes are.
    name : str
        The name by which all ranks know them.
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
    member : int
        The number that this rank owns, from 0.
    order : list of int
        The stripes in the order in which this rank visits them.
    """

    def __init__(
        self,
        named_memory: NamedMemory,
        name: str,
        layout: bytes,
        check: Callable[[bytes], None],
        count: int,
        nbytes: int,
        fill: Callable[[int, np.ndarray], None],
        pause: Callable[[], None],
    ) -> None:
        self._named_memory, self._name, self._pause = named_memory, name, pause
        self._count, self._nbytes = count, nbytes
        self._layout = layout
        self._n_held = 0
        first, *self._locks = named_memory.locks(name, 1 + count)
        self._acquire(first)
        try:
            self._begin(check, fill)
        finally:
            first.release()
        self._become_member()

    def _begin(self, check: Callable[[bytes], None], fill: Callable[[int, np.ndarray], None]) -> None:
        """Fill the stripes unless a rank has already filled them completely."""
        header = self._array("", 2, "int64").data
        if header[_READY]:
            check(self._describe(header[_LAYOUT]).tobytes())
            self._open()
            return
        header[_LAYOUT] = len(self._layout)
        described = self._describe(len(self._layout))
        described[...] = np.frombuffer(self._layout, np.uint8)
        self._open()
        for number in range(self._count):
            fill(number, self._memories[number])
            self._table[number, _MEMORY] = 1 + number
        header[_READY] = 1

    def _describe(self, length: int) -> np.ndarray:
        return self._array(f"layout of {length} bytes", length, "uint8")

    def _open(self) -> None:
        shape = self._count, self._nbytes
        self._memories = list(self._array("{} x {}".format(*shape), shape, "uint8"))
        self._table = self._array(f"table of {self._count}", (self._count, 2), "int64").data
        self._members = self._array("members", (_MEMBERS, 3), "int64").data

    def _array(self, part: str, shape: int | Sequence[int], dtype: str) -> np.ndarray:
        return self._named_memory.array(f"{self._name} {part}".rstrip(), shape, dtype)

    def _become_member(self) -> None:
        locks = enumerate(self._named_memory.locks(f"{self._name} members", _MEMBERS))
        for self.member, self._own in locks:
            if self._own.try_acquire():
                break
        else:
            raise RuntimeError(f"{self._name}: at most {_MEMBERS} ranks can use it at once")
        if self._members[self.member, _SPARE] and self._count:
            try:
                former = self._members[self.member, _STRIPE]
                self._acquire(self._locks[former])
                try:
                    self._finish(former)
                finally:
                    self._locks[former].release()
            except BaseException:
                self.resign()
                raise
        else:
            self._members[self.member, _SPARE] = 1 + self._count + self.member
        self.order = order_of(self.member, self._count)

    def read(self, work: Callable[[int, np.ndarray], None]) -> None:
        """Call ``work(number, memory)`` for each stripe, under its lock."""

        def visit(number: int) -> bool:
            memory = self.enter(number)
            if memory is None:
                return False
            try:
                work(number, memory)
            finally:
                self.leave(number)
            return True

        visit_all(self.order, visit, self._pause)

    def change(self, work: Callable[[int, np.ndarray, np.ndarray], None]) -> None:
        """Call ``work(number, memory, new)`` for each stripe, under its lock. It writes all of `new`."""

        def replace(number: int, memory: np.ndarray) -> None:
            work(number, memory, self.spare)
            self.replace(number)

        self.read(replace)

    # The steps of a visit

    def enter(self, number: int) -> np.ndarray | None:
        """Take the lock of a stripe, and return its memory; return None if another rank has the lock."""
        if not self._n_held and not self._locks[number].try_acquire():
            return None
        try:
            self._finish(number)
            return self._memory(self._table[number, _MEMORY])
        except BaseException:
            self.leave(number)
            raise

    @property
    def spare(self) -> np.ndarray:
        """The memory for the next contents of a stripe."""
        return self._memory(self._members[self.member, _SPARE])

    def replace(self, number: int) -> None:
        """Make the spare the memory of a stripe whose lock this rank has."""
        table, members, own = self._table, self._members, self.member
        former, spare = table[number, _MEMORY], members[own, _SPARE]
        members[own, _FORMER], members[own, _STRIPE] = former, number
        table[number, _LAST] = 1 + own
        table[number, _MEMORY] = spare  # this changes the stripe
        members[own, _SPARE] = former

    def leave(self, number: int) -> None:
        """Give back the lock of a stripe."""
        if not self._n_held:
            self._locks[number].release()

    # Several visits that no other rank interrupts

    def try_hold(self) -> bool:
        """Take the locks of all stripes; return False if another rank has one.

        The locks before that one are kept, and the next call goes on from there.

        All ranks take them in the same order, and no rank waits for a lock during a visit, so there is
        no deadlock. Until `let_go`, visits take and release no locks.
        """
        while self._n_held < self._count:
            if not self._locks[self._n_held].try_acquire():
                return False
            self._n_held += 1
        return True

    def let_go(self) -> None:
        """Give back the locks that `try_hold` has taken."""
        for lock in self._locks[: self._n_held]:
            lock.release()
        self._n_held = 0

    def resign(self) -> None:
        """Let another rank be this member."""
        self._own.release()

    def _finish(self, number: int) -> None:
        """Complete the last change of a stripe if its member died before doing so."""
        last = self._table[number, _LAST] - 1
        if last >= 0 and self._members[last, _SPARE] == self._table[number, _MEMORY]:
            self._members[last, _SPARE] = self._members[last, _FORMER]

    def _memory(self, number: int) -> np.ndarray:
        """Return a memory by its number: first those of the stripes, then a memory for each member."""
        while number > len(self._memories):
            spare = f"spare {len(self._memories) - self._count} of {self._nbytes} bytes"
            self._memories.append(self._array(spare, self._nbytes, "uint8"))
        return self._memories[number - 1]

    def _acquire(self, lock: Lock) -> None:
        while not lock.try_acquire():
            self._pause()


def visit_all(order: Sequence[int], visit: Callable[[int], bool], pause: Callable[[], None]) -> None:
    """Call ``visit(number)`` for each stripe. Busy stripes, for which it returns False, come last."""
    waiting = list(order)
    while waiting:
        busy = [number for number in waiting if not visit(number)]
        if len(busy) == len(waiting):
            pause()
        waiting = busy


def order_of(member: int, count: int) -> list[int]:
    """Return the order in which a member visits the stripes. Members start at different stripes."""
    start = int(member * _SPREAD % 1 * count)
    return [*range(start, count), *range(start)]


# On another machine


class Request(NamedTuple):
    """A request of a rank.

    Attributes
    ----------
    restarts : int
        How often the rank was replaced, to distinguish its requests from a dead rank's.
    kind : str
        ``"open"``, ``"fill"``, ``"visit"``, ``"hold"`` or ``"let go"``.
    name : str
        The name of the stripes.
    arguments : tuple
        The arguments of the request.
    nbytes : int
        The length of each of the two memories beside the channel; 0 for none.
    has_data : bool
        Whether the first one has data to send.
    """

    restarts: int
    kind: str
    name: str
    arguments: tuple[Any, ...]
    nbytes: int
    has_data: bool


class StripeChannel(Channel):
    """Where a rank and its progress process exchange requests, answers and contents of stripes.

    Parameters
    ----------
    named_memory : NamedMemory
        The named memory of the machine.
    rank : int
        The rank that asks.
    """

    def __init__(self, named_memory: NamedMemory, rank: int) -> None:
        self._named_memory, self._name = named_memory, f"stripes for rank {rank}"
        [bell] = wakeup_semaphores(named_memory, self._name, 1)
        super().__init__(named_memory, self._name, bell)

    def memories(self, restarts: int, nbytes: int) -> Sequence[np.ndarray]:
        """Return the memory for a rank's own contents, and the memory for contents that it receives."""
        name = f"{self._name}: {nbytes} bytes after {restarts} restarts"
        return list(self._named_memory.array(name, (2, nbytes), "uint8"))


class RemoteStripes:
    """Like `Stripes`, for a rank on another machine.

    Parameters
    ----------
    channel : StripeChannel
        The channel to the progress process.
    restarts : int
        How often the rank has died and was replaced.
    name, layout, check, count, nbytes, fill, pause
        As for `Stripes`.
    """

    def __init__(
        self,
        channel: StripeChannel,
        restarts: int,
        name: str,
        layout: bytes,
        check: Callable[[bytes], None],
        count: int,
        nbytes: int,
        fill: Callable[[int, np.ndarray], None],
        pause: Callable[[], None],
    ) -> None:
        self._channel, self._restarts, self._name, self._pause = channel, restarts, name, pause
        self._nbytes = nbytes
        self._sent, self._received = channel.memories(restarts, nbytes)
        answer = "busy"
        while True:
            answer, found = self._ask("open", layout, count, nbytes)
            if answer == "opened":
                break
            if answer == "other":
                check(found)
            elif answer == "absent":
                for number in range(count):
                    fill(number, self._sent)
                    self._ask("fill", number, has_data=True)
            pause()
        self.order = order_of(found, count)

    def read(self, work: Callable[[int, np.ndarray], None]) -> None:
        """As `Stripes.read`."""
        self._visit(False, work)

    def change(self, work: Callable[[int, np.ndarray, np.ndarray], None]) -> None:
        """Like `Stripes.change`."""
        self._visit(True, lambda number, memory: work(number, memory, self._sent))

    def try_hold(self) -> bool:
        """As `Stripes.try_hold`."""
        return self._ask("hold")

    def let_go(self) -> None:
        """As `Stripes.let_go`."""
        self._ask("let go")

    def _visit(self, changes: bool, work: Callable[[int, np.ndarray], None]) -> None:
        changed = None  # the stripe that was entered and has to be replaced

        def visit(number: int) -> bool:
            nonlocal changed
            stored, changed = changed, None
            if not self._ask("visit", stored, number, changes, has_data=stored is not None):
                return False
            work(number, self._received)
            changed = number if changes else None
            return True

        try:
            visit_all(self.order, visit, self._pause)
        except Exception:
            changed = None
            self._ask("visit", None, None, changes)  # so that it leaves the stripe it has entered
            raise
        if changed is not None:
            self._ask("visit", changed, None, changes, has_data=True)

    def _ask(self, kind: str, *arguments: Any, has_data: bool = False) -> Any:
        request = Request(self._restarts, kind, self._name, arguments, self._nbytes, has_data)
        asked = pickle.dumps(tuple(request))
        return pickle.loads(self._channel.ask(asked, _AWAKE, self._pause))
