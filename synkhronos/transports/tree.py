"""Many ranks on one machine: the start of a command spreads along a tree, and one post ends it.

Starting: the master posts the start semaphores of the workers next to it in the tree. A worker that
wakes posts those of the workers below it, before it takes the command. So the time until all have
started, and the master's part of it, grow with the logarithm of their number.

Finishing: a worker that has replied increments a semaphore for which nobody waits. Who finds all in it
posts the one semaphore that the master waits for. Nobody waits for another worker. The master then reads
all replies.

Dead workers: neither a start nor the end is believed because of a post alone. Each command has a number,
and a worker takes a number only once; so the workers below a dead one can be started again by whoever
takes its place. The master looks whether every rank has noted that it has finished this command. So a
post too many is harmless. A post is missing only where a worker has died, and the master posts then.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

from synkhronos.arithmetic.machines import children, parent
from synkhronos.host.machine import leave_core_of
from synkhronos.host.status import PROCESS
from synkhronos.stores.base import SharedMemoryStore
from synkhronos.stores.handle import Needs
from synkhronos.transports.local import LocalTransport
from synkhronos.transports.waiting import Semaphore

# A rank starts seven others in each level. With a larger radix the last of these start later; with a
# smaller one there are more levels, each of which takes 50 microseconds if the workers sleep.
RADIX = 8
MOST_WITHOUT = RADIX + 1  # ranks: with so many, the master starts all workers in any case


def make_local(
    size: int,
    master_rank: int = 0,
    timeout: float | None = None,
    may_poll: bool | None = None,
    store: SharedMemoryStore | None = None,
    labels: Sequence[int] | None = None,
) -> LocalTransport:
    """Return the transport of ranks on this machine: with a tree, if there are many."""
    kind = TreeTransport if size > MOST_WITHOUT else LocalTransport
    return kind(size, master_rank, timeout, may_poll, store, labels, make_local)


class TreeTransport(LocalTransport):
    """Forked processes on this machine, which start each other along a tree.

    Parameters
    ----------
    *args, **kwargs
        The parameters of `LocalTransport`.
    radix : int
        Of the tree; see `synkhronos.arithmetic.machines`.
    """

    def __init__(self, *args: Any, radix: int = RADIX, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._radix = radix
        memory = self.store.memory
        self._replied, self._all_replied = Semaphore(memory), Semaphore(memory)
        self._last = self.store.empty((1,), "int64").data  # the rank that has posted that all have
        self._taken = 0  # the number of the last command that this worker has taken
        self._set_place()

    def _set_place(self) -> None:
        """Find the ranks next to this one in the tree."""
        self._start, self._post_reply = _Start(self._starts[self.rank], self._take), self._note_reply
        self._post_below = [self._starts[rank].post for rank in self._below(self.rank)]

    def _below(self, rank: int) -> list[int]:
        """Return the ranks that a rank starts."""
        first = self.master_rank
        places = children((rank - first) % self.size, self.size, self._radix)
        return [(place + first) % self.size for place in places]

    def _above(self, rank: int) -> int:
        """Return the rank that starts a worker."""
        first = self.master_rank
        return (parent((rank - first) % self.size, self._radix) + first) % self.size

    def _find_partners(self) -> None:
        super()._find_partners()
        if self.rank != self.master_rank:
            self._set_place()

    def release(self) -> None:
        super().release()
        self._replied = self._all_replied = None  # type: ignore[assignment]
        self._start = self._last = None  # type: ignore[assignment]

    # Between master and workers

    def post(self, payload: bytes, needs: Needs | None = None) -> None:
        if self.is_copy:
            self.end_copy()
        self._replied.reset()
        self._all_replied.drain()  # two workers may have found that they were the last
        super().post(payload, needs)
        if not payload:  # the end: also of workers below one that is stopped
            for rank in self._workers:
                self._starts[rank].post()

    def _wait_for_replies(self) -> list[bytes | None]:
        waited = 0.0
        while not self._progress.all_finished():
            waited = self._wait(self._all_replied, self._between, waited)
        return [None if rank == self.rank else box.get() for rank, box in enumerate(self._replies)]

    def _wait_for_start(self, when_idle: Callable[[], None]) -> None:
        taken = self._taken
        while self._taken == taken:
            self._wait(self._start, self._between, when_idle=when_idle)  # type: ignore[arg-type]
            self._take()

    def _take(self) -> None:
        """Take a new command, after a post, and pass it on to the workers below this one."""
        number = self._progress.command[0]
        if number != self._taken:
            self._taken = number
            for post in self._post_below:
                post()
            self._progress.begin_on(self.rank)

    def _note_reply(self) -> None:
        self._replied.post()
        if self._replied.read() >= self.size - 1:
            self._last[0] = self.rank
            self._all_replied.post()

    def _reset(self) -> None:
        super()._reset()
        for rank in self._workers:  # of workers that were started twice
            self._starts[rank].drain()

    # Dead workers

    def _fork_replacement(self, rank: int, prepare: Callable[[bool], None]) -> None:
        # For the new worker. It starts the workers below it, whether the dead one has done so or not.
        self._taken = self._progress.command[0] - (not self._progress.has_finished(rank))
        super()._fork_replacement(rank, prepare)

    def answer_for(self, rank: int, payload: bytes) -> None:
        super().answer_for(rank, payload)
        for below in self._below(rank):
            self._starts[below].post()

    def _finish_again(self, rank: int) -> None:
        self._replied.post()
        self._all_replied.post()

    def _not_late(self) -> set[int]:
        """The ranks below one that has not begun cannot begin."""
        has_begun = self._progress.has_begun
        others = {*self._workers} - {*self._below(self.master_rank)}
        waiting = {rank for rank in others if not (has_begun(rank) or has_begun(self._above(rank)))}
        return {self.rank, *waiting}

    # Cores

    def _core_leaver(self) -> Callable[[], bool]:
        process = self.status.line(self._above(self.rank))[PROCESS:]
        return lambda: leave_core_of(process[0])

    def _leave_core(self) -> bool:
        self._awaited = self._last[0]
        return super()._leave_core()


class _Start:
    """A worker's start semaphore. A worker that has slept passes the post on before it does anything."""

    __slots__ = ("try_wait", "_semaphore", "_pass_on")

    def __init__(self, semaphore: Semaphore, reraise_if_handlers: Callable[[], None]) -> None:
        self.try_wait = semaphore.try_wait
        self._semaphore, self._pass_on = semaphore, reraise_if_handlers

    def wait(self, seconds: float) -> bool:
        """Decrement it. Return False after `seconds`, or if a signal handler must run."""
        if not self._semaphore.wait(seconds):
            return False
        self._pass_on()
        return True
