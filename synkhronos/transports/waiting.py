"""How, and for how long, a waiting rank polls before it sleeps.

A sleeping core takes about 50 microseconds to respond. On some processors it also computes 15 to 20%
slower for a while afterwards. A rank that has its own core therefore polls first. Polling occupies the
core and delays other threads of the process, so its time is limited to `SHARE` of the time of the work
that the rank has just done, with a minimum of `SHORTEST` and a maximum of `LONGEST` seconds. After
polling without success, a rank polls half as long the next time, down to `LEAST` of the limit. When a
wait is shorter than the limit, the full limit applies again.

A poll gives other processes the core. If it then takes long until the rank has it back, the rank shares
the core, perhaps with another rank while a core is idle: the kernel does not move a process that has run
less than half a millisecond ago. The kernel looks for an idle core when it wakes a process, so the rank
does not poll in its next wait, but sleeps.
"""

import os
import time

SHARE = 0.25
SHORTEST = 2e-4  # seconds
LONGEST = 4e-2  # seconds
LEAST = 1 / 64
SHARED = 1e-4  # seconds for which a rank that shares its core may not have it

_POLLS = range(32)  # polls between two readings of the clock; each takes about 80 nanoseconds


class Patience:
    """How long to poll in one kind of wait: between commands, or inside a command."""

    def __init__(self):
        self.fraction = 1.0  # fraction of the limit
        self._shares_core = False

    @staticmethod
    def limit(worked):
        """Return the limit, in seconds, after `worked` seconds of work."""
        return min(max(SHARE * worked, SHORTEST), LONGEST)

    def poll(self, try_wait, began, worked):
        """Poll until ``try_wait()`` returns 0 or the time limit is reached.

        Parameters
        ----------
        try_wait : callable
        began : float
            The start of the wait, by ``time.monotonic``.
        worked : float
            Seconds of work before the wait.

        Returns
        -------
        bool
            Whether ``try_wait()`` returned 0.
        """
        if self._shares_core:
            self._shares_core = False
            return False
        until = began + self.fraction * self.limit(worked)
        while True:
            for _ in _POLLS:
                if not try_wait():
                    self.fraction = 1.0
                    return True
            now = time.monotonic()
            if now >= until:
                return False
            # Other threads may need the interpreter, and other processes this core.
            os.sched_yield()
            if time.monotonic() - now > SHARED:
                self._shares_core = True

    def learn(self, worked, waited):
        """Adjust the limit after a wait of this duration in which polling failed."""
        if waited < self.limit(worked):
            self.fraction = 1.0
        else:
            self.fraction = max(self.fraction / 2, LEAST)
