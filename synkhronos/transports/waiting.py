"""How a waiting rank polls, and for how long, before it sleeps.

A core that sleeps takes some 50 microseconds to answer, and on some processors computes 15 to 20%
slower for a while after it. So a rank with a core to itself polls at first. As polling takes the time
of a core, and of other threads of the process, it is limited in proportion to the work that the rank
has just done: to `SHARE` of it, so that polling costs little against the work, but to no less than
`SHORTEST` and no more than `LONGEST` seconds. A rank that has polled in vain polls half as long the next
time, down to `LEAST` of the limit; once a wait was shorter than the limit, the whole limit counts again.
"""

import os
import time

SHARE = 0.25
SHORTEST = 2e-4  # seconds
LONGEST = 4e-2  # seconds
LEAST = 1 / 64

_POLLS = range(32)  # between two looks at the clock, some 80 nanoseconds each


class Patience:
    """How long to poll in waits of one kind: those between commands, or those inside one."""

    def __init__(self):
        self.fraction = 1.0  # of the limit

    @staticmethod
    def limit(worked):
        """Return the limit, in seconds, after so many seconds of work."""
        return min(max(SHARE * worked, SHORTEST), LONGEST)

    def poll(self, try_wait, began, worked):
        """Poll until ``try_wait()`` returns 0, or for as long as it is worth it.

        Parameters
        ----------
        try_wait : callable
        began : float
            When the wait began, on the clock of ``time.monotonic``.
        worked : float
            Seconds of work before it.

        Returns
        -------
        bool
            Whether ``try_wait()`` has returned 0.
        """
        until = began + self.fraction * self.limit(worked)
        while True:
            for _ in _POLLS:
                if not try_wait():
                    self.fraction = 1.0
                    return True
            if time.monotonic() >= until:
                return False
            # Other threads may want the interpreter, and other processes this core.
            os.sched_yield()

    def learn(self, worked, waited):
        """Take into account how long a wait has lasted in which polling was in vain."""
        if waited < self.limit(worked):
            self.fraction = 1.0
        else:
            self.fraction = max(self.fraction / 2, LEAST)
