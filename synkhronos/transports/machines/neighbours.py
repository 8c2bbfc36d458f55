"""The machines next to this one, which its courier watches: whether they answer.

A courier does not compute, so it sees what a leader in a long call cannot. The couriers form a ring, so
each machine is watched by two others, however many there are. What is watched is the connection that MPI
has opened; the kernels of both machines see to it that something travels on it every second.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from typing import Callable, Collection, Mapping, NamedTuple, Sequence

from synkhronos.host.connections import Addresses, connections, enable_keepalive, seconds_silent
from synkhronos.transports.liveness import has_ended

LIMIT = 3.0  # seconds of silence for which a machine counts as lost
_SUSPECT = 2.0  # the same, if mpirun ends the job
_CHECK_INTERVAL = 0.25  # seconds


class Neighbour(NamedTuple):
    """What a courier tells its neighbours.

    Attributes
    ----------
    machine : int
    host : str
    connections : collection of Addresses
        Of its process.
    """

    machine: int
    host: str
    connections: Collection[Addresses]


class Neighbours:
    """The watch over the machines next to this one.

    Parameters
    ----------
    own : Neighbour
        This machine.
    others : sequence of Neighbour
    leader : int
        The process id of this machine's leader.
    end : callable
        Ends the job.

    Attributes
    ----------
    names : mapping or list
        What messages to users call the machines, by their numbers.
    """

    def __init__(
        self, own: Neighbour, others: Sequence[Neighbour], leader: int, end: Callable[[], None]
    ) -> None:
        self.names: Mapping[int, str] | Sequence[str] = {
            one.machine: f"machine {one.host}" for one in (own, *others)
        }
        self._machine, self._leader, self._end = own.machine, leader, end
        self._watched = _between(own, others)
        for _, _, descriptor in self._watched:
            enable_keepalive(descriptor)
        self._next = time.monotonic()
        self._has_reported = False

    def check(self) -> None:
        """Report a lost machine, and end the job. It may be called at any time, and often."""
        now = time.monotonic()
        if now < self._next or self._has_reported:
            return
        self._next = now + _CHECK_INTERVAL
        silent = self._silent(LIMIT)
        if silent:
            self._report(silent)
            self._end()

    def report_when_ended(self) -> None:
        """Report what is lost if mpirun ends the job: it sends SIGCONT a moment before SIGTERM."""
        signal.signal(signal.SIGCONT, lambda number, frame: self.report())

    def stop(self) -> None:
        """Report nothing any more: the job comes to its end."""
        self._has_reported = True

    def report(self) -> None:
        """Write a line for each machine that is lost, once."""
        if not self._has_reported:
            self._report(self._silent(_SUSPECT))

    def _report(self, silent):
        causes = {
            machine: f"it has not answered for {seconds:.0f} seconds, so it has no power, or the "
            f"network to it is interrupted"
            for machine, seconds in silent.items()
        }
        if has_ended(self._leader):
            causes[self._machine] = "its first process has died"
        lines = [
            f"{self.names[machine]} was lost: {cause}\n" for machine, cause in causes.items()
        ]
        if lines:
            self._has_reported = True
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(2, "".join(lines).encode())

    def _silent(self, limit):
        """Return the machines that have been silent for longer, with the seconds."""
        found: dict[int, float] = {}
        for machine, addresses, descriptor in self._watched:
            seconds = seconds_silent(descriptor, addresses)
            if limit < seconds < math.inf:  # mpirun sees the death of a task that has closed it
                found[machine] = max(seconds, found.get(machine, 0))
        return found


def _between(own, others):
    """Return the machine, addresses and descriptor of this process's connections to others."""
    descriptors = connections()
    return [
        (other.machine, (here, there), descriptors[here, there])
        for other in others
        for there, here in other.connections
        if (here, there) in descriptors and (here, there) in own.connections
    ]
