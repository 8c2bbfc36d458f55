"""How many cores other programs use."""

from __future__ import annotations

import os
import time

from synkhronos.host.handler_errors import suppress
from synkhronos.host.machine import affinity


class OtherPrograms:
    """The cores that processes other than this one and its children use, from now on.

    Virtual machines that use cores of the host (*steal*) are others, too.
    """

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy(), _own()

    @property
    def seconds(self) -> float:
        """The time since the beginning."""
        return time.monotonic() - self._began

    def own_cores(self) -> float:
        """Return how many cores this process and its children have used, on average."""
        return (_own() - self._own) / self.seconds

    def cores(self) -> float:
        """Return how many of the cores that this process may use the others have used, on average."""
        used = (_busy() - self._busy) - (_own() - self._own)
        return min(max(used / self.seconds, 0.0), float(affinity()))


def _busy() -> float:
    """Return the seconds for which the cores of this process have computed anything."""
    import psutil  # takes 6 ms, so not at import

    by_core = psutil.cpu_times(percpu=True)
    with suppress(IndexError):  # a container that shows fewer cores
        by_core = [by_core[number] for number in sorted(os.sched_getaffinity(0))]
    # Times of guests are part of the times of users; see proc(5).
    return sum(sum(item) - item.idle - item.iowait - item.guest - item.guest_nice for item in by_core)


def _own() -> float:
    """Return the seconds for which this process and its children, also ended ones, have computed."""
    import psutil

    this, seconds = psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:4])  # user, system, and those of its ended children
    return seconds
