"""How ranks wait: semaphores, how long a rank polls before it sleeps, and how far each rank has come.

Semaphores have no name: a named one is a file in ``/dev/shm`` between its creation and its unlinking,
and the file remains if the process is killed in between. One in an anonymous mapping needs no file and
no descriptor, and disappears with the last process that has the mapping.

A sleeping core takes about 50 microseconds to respond. On some processors it also computes 15 to 20%
slower for a while afterwards. A rank that has its own core therefore polls first. Polling occupies the
core and delays other threads of the process, so its time is limited to `SHARE` of the time of the work
that the rank has just done, with a minimum of `SHORTEST` and a maximum of `LONGEST` seconds. After
polling without success, a rank polls half as long the next time, down to `LEAST` of the limit. When a
wait is shorter than the limit, the full limit applies again.

In some virtual machines, Linux does not regard an idle core as available when it wakes a process. It
puts the process on the core of the waker, where it has to wait. It also does not migrate a process that
ran within the last half millisecond. So a woken rank leaves the waker's core by itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from functools import partial
from typing import Callable, Collection, Sequence

import numpy as np

from synkhronos.host.status import BEGUN, FINISHED, LINE, NONE, PASSED, REACHED, REACHED_IN, StatusPage
from synkhronos.stores.memory import SharedMemory

SHARE = 0.25
SHORTEST = 2e-4  # seconds
LONGEST = 4e-2  # seconds
LEAST = 1 / 64
AFTER_MOVE = 5.0  # limits to poll after a move to another core; other ranks may be about to move, too

# Polls between two readings of the clock, and offers of the interpreter and the core to others. Each
# takes about 80 nanoseconds, so the next short call usually comes before that.
_POLLS = range(128)
_COLD = 1e-3  # seconds of work that leave little else in the processor's caches

_ALL = 1 << 62  # more barriers than there are in any command

#: The memory of a semaphore. sem_t is smaller on all systems; each gets its own cache line.
NBYTES = 64

_PLACE = ctypes.c_char * NBYTES


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


# Calls that never wait keep the interpreter's lock, which is faster, as is omitting the argument types.
_NON_BLOCKING = ctypes.PyDLL(None)
_BLOCKING = ctypes.CDLL(None, use_errno=True)
if hasattr(_BLOCKING, "sem_clockwait"):
    _CLOCK = time.CLOCK_MONOTONIC
    _WAIT: tuple = (_BLOCKING.sem_clockwait, _CLOCK)
else:  # glibc before 2.30
    _CLOCK = time.CLOCK_REALTIME
    _WAIT = (_BLOCKING.sem_timedwait,)


class Semaphore:
    """A POSIX semaphore, initially zero.

    Parameters
    ----------
    memory : SharedMemory, optional
        Where to allocate it.
    array : numpy.ndarray, optional
        Used instead of `memory`: the `NBYTES` bytes of the semaphore, shared with other processes.
    is_new : bool
        Whether to initialize it. Do not initialize a semaphore that other processes already use.

    Attributes
    ----------
    post : callable
        ``post()`` increments it.
    try_wait : callable
        ``try_wait()`` decrements it and returns 0, or returns another number if it is zero.
    """

    __slots__ = ("post", "try_wait", "_wait", "_place")

    def __init__(
        self, memory: SharedMemory | None = None, array: np.ndarray | None = None, is_new: bool = True
    ) -> None:
        if array is None:
            array = memory.allocate(NBYTES)  # type: ignore[union-attr]  # one of the two is given
        self._place = place = ctypes.byref(_PLACE.from_buffer(array))  # type: ignore[arg-type]  # NumPy has no hint
        if is_new:
            self.reset()
        self.post = partial(_NON_BLOCKING.sem_post, place)
        self.try_wait = partial(_NON_BLOCKING.sem_trywait, place)
        function, *clock = _WAIT
        self._wait = partial(function, place, *clock)

    def wait(self, seconds: float) -> bool:
        """Decrement it. Return False after `seconds`, or if a signal handler must run."""
        until = time.clock_gettime(_CLOCK) + seconds
        whole = int(until)
        if not self._wait(ctypes.byref(_Time(whole, int((until - whole) * 1e9)))):
            return True
        if ctypes.get_errno() in (errno.ETIMEDOUT, errno.EINTR):
            return False
        raise _error("sem_wait")

    def drain(self) -> None:
        """Decrement it to zero."""
        while not self.try_wait():
            pass

    def reset(self) -> None:
        """Set it to zero, while no process waits for it."""
        if _BLOCKING.sem_init(self._place, 1, 0):
            raise _error("sem_init")

    def read(self) -> int:
        """Return its value. Who has incremented it last finds all increments in it."""
        found = ctypes.c_int()
        _NON_BLOCKING.sem_getvalue(self._place, ctypes.byref(found))
        return found.value


def _error(name: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), name)


class SpinPolicy:
    """How long to poll in one kind of wait: between commands, or inside a command.

    Parameters
    ----------
    inside : SpinPolicy, optional
        Of waits inside a command, if this is for waits between commands.
    leave_core : callable, optional
        Called after this rank has slept, to leave the core of the rank that woke it. Returns whether it
        did.

    Attributes
    ----------
    fraction : float
        The fraction of the limit.
    resumed : float
        When the last wait of this kind ended, by ``time.monotonic``. The work before a wait between
        commands is the whole last command, including any waits inside it.
    """

    def __init__(
        self, inside: SpinPolicy | None = None, leave_core: Callable[[], bool] = lambda: False
    ) -> None:
        self.fraction = 1.0
        self.resumed = time.monotonic()
        self._inside, self._leave_core = inside, leave_core

    def resume(self) -> float:
        """Note that a wait has ended; return the time."""
        self.resumed = now = time.monotonic()
        if self._inside is not None:
            self._inside.resumed = now
        return now

    @staticmethod
    def limit(worked: float) -> float:
        """Return the limit, in seconds, after `worked` seconds of work."""
        return min(max(SHARE * worked, SHORTEST), LONGEST)

    def poll(
        self,
        try_wait: Callable[[], int],
        began: float,
        worked: float,
        when_idle: Callable[[], None] | None = None,
    ) -> bool:
        """Poll until ``try_wait()`` returns 0, and note the time, or until the limit is reached.

        Parameters
        ----------
        try_wait : callable
            Decrements the semaphore and returns 0, or returns another number if it is zero.
        began : float
            The start of the wait, by ``time.monotonic``.
        worked : float
            Seconds of work before the wait.
        when_idle : callable, optional
            Called once after long work, unless the wait ends at once.

        Returns
        -------
        bool
            Whether ``try_wait()`` returned 0.
        """
        now, until, is_cold = began, None, when_idle is not None and worked > _COLD
        while True:
            for _ in _POLLS:
                if not try_wait():
                    # `now` is up to ten microseconds old, which makes no difference.
                    self.fraction, self.resumed = 1.0, now
                    if self._inside is not None:
                        self._inside.resumed = now
                    return True
            if is_cold and when_idle is not None:
                is_cold = False
                when_idle()
            now = time.monotonic()
            if until is None:
                until = began + min(self.fraction * self.limit(worked), LONGEST)
            if now >= until:
                return False
            # Other threads may need the interpreter, and other processes this core.
            os.sched_yield()

    def learn(self, worked: float, waited: float, has_core: int = True) -> None:
        """Adjust the limit after a wait of this duration in which polling failed, and the rank slept.

        Parameters
        ----------
        worked, waited : float
            Seconds.
        has_core : int
            1 if there is a core for each rank, else 0. If another rank was on this rank's core
            nevertheless, the wait was longer than it would otherwise have been.
        """
        if has_core and self._leave_core():
            self.fraction = AFTER_MOVE
        elif waited < self.limit(worked):
            self.fraction = 1.0
        else:
            self.fraction = max(self.fraction / 2, LEAST)


class BarrierProgress:
    """The barriers that each rank has reached, in memory that all ranks share.

    Each rank writes to a cache line of its own, with the number of the command. So nothing has to be
    reset before the next command, and a short command takes no time for memory that another core has
    written to.

    Parameters
    ----------
    page : StatusPage
        Their memory, which other processes can read.

    Attributes
    ----------
    command, aborted : memoryview
        The number of the last command, and the first barrier at which it is aborted, from 1; 0 for none.
    """

    def __init__(self, page: StatusPage) -> None:
        self._lines = page.lines
        self._size = len(page.lines) // LINE
        self._finished = page.lines[FINISHED::LINE]
        self.command, self.aborted = page.command, page.aborted
        for rank in range(self._size):
            self.forget(rank)

    def begin_on(self, rank: int) -> None:
        """Record that a rank has begun the command, and has started the ranks below it in a tree."""
        self._lines[rank * LINE + BEGUN] = self.command[0]

    def has_begun(self, rank: int) -> bool:
        """Whether a rank of a tree has recorded that."""
        return self._lines[rank * LINE + BEGUN] == self.command[0]

    def forget(self, rank: int) -> None:
        """Record that a rank has not reached anything: another process has its place."""
        line = rank * LINE
        self._lines[line + FINISHED] = self._lines[line + REACHED_IN] = NONE

    def finish(self, rank: int, passed: int) -> None:
        """Record that a rank has finished the command, and how many barriers it has passed."""
        line = rank * LINE
        self._lines[line + PASSED] = passed
        self._lines[line + FINISHED] = self.command[0]

    def has_finished(self, rank: int) -> bool:
        """Whether a rank has finished the command."""
        return self._lines[rank * LINE + FINISHED] == self.command[0]

    def all_finished(self) -> bool:
        """Whether all ranks have finished the command."""
        return self._finished.tolist().count(self.command[0]) == self._size

    def missing(self, passed: int) -> list[int]:
        """Return the ranks that have finished without reaching the barrier after the first `passed`."""
        return [
            rank
            for rank in range(self._size)
            if self.has_finished(rank) and self._lines[rank * LINE + PASSED] <= passed
        ]

    def describe_late(self, without: Collection[int], labels: Sequence[int]) -> str:
        """Name the ranks, except some, that have reached the fewest barriers."""
        reached = {other: self._reached(other) for other in range(self._size) if other not in without}
        first = min(reached.values())
        doing = "computing" if first == 0 else f"after barrier {first} of the command"
        behind = [other for other in reached if reached[other] == first]
        return ", ".join(f"rank {labels[other]} (running, {doing})" for other in behind)

    def _reached(self, rank: int) -> int:
        """Return how many barriers a rank has reached."""
        if self.has_finished(rank):
            return _ALL
        line = rank * LINE
        return self._lines[line + REACHED] if self._lines[line + REACHED_IN] == self.command[0] else 0
