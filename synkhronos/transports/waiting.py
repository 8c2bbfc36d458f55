"""How, and for how long, a waiting rank polls before it sleeps.

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

import os
import time
from typing import Callable

SHARE = 0.25
SHORTEST = 2e-4  # seconds
LONGEST = 4e-2  # seconds
LEAST = 1 / 64
AFTER_MOVE = 5.0  # limits to poll after a move to another core; other ranks may be about to move, too

# Polls between two readings of the clock, and offers of the interpreter and the core to others. Each
# takes about 80 nanoseconds, so the next short call usually comes before that.
_POLLS = range(128)
_COLD = 1e-3  # seconds of work that leave little else in the processor's caches


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
