"""How a progress process watches the machines next to its own.

A progress process does not compute, so it sees what a leader in a long call cannot. The progress
processes form a ring, so each machine is watched by two others, however many there are. A progress
process watches the connections that MPI has opened to the leader and the progress process of the other
machine. The kernels of both machines send packets on them every second, and close them when the
processes end. A progress process says goodbye when the script has ended, or when mpirun begins to end
the job. So a progress process whose connection is closed without a goodbye has died.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from typing import Any, Callable, Collection, Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos.host.signals import SignalThread
from synkhronos.machines.connections import Addresses, connections, enable_keepalive, seconds_silent
from synkhronos.machines.links import Links, LostError, Receipt
from synkhronos.transports.children import has_ended

LIMIT = 3.0  # seconds of silence for which a machine counts as lost
_SUSPECT = 2.0  # the same, if mpirun ends the job
_CHECK_INTERVAL = 0.25  # seconds
# Seconds from SIGCONT until a machine whose processes have died has closed its connections: MPI ends a
# process that sends to it before. The other processes of a progress process that died alone live for a
# second longer: then they get SIGTERM.
_DYING = 0.5
_STUCK = 0.75  # seconds from SIGCONT until a progress process that is not in a call of MPI has looked
_ENDED = 4.0  # seconds from SIGCONT until mpirun has certainly ended the processes of a machine
_ARRIVING = 0.1  # seconds within which MPI has read the data of a connection that was closed
_NAP = 0.01  # seconds
_GOODBYE = (
    0  # a tag; its messages are one byte: 1 if the progress process leaves, 0 if it stays after all
)


class Neighbour(NamedTuple):
    """What the progress processes of the machines next to a task are told about it.

    Attributes
    ----------
    machine : int
        The number of the machine.
    is_progress_process : bool
        Whether the process is a progress process, and not a leader.
    host : str
        The name of the host.
    connections : collection of Addresses
        Of its process.
    """

    machine: int
    is_progress_process: bool
    host: str
    connections: Collection[Addresses]


class Neighbours:
    """The watch over the machines next to this one.

    Parameters
    ----------
    own : Neighbour
        This progress process.
    others : sequence of Neighbour
        The leaders and progress processes of the machines next to this one.
    leader : int
        The process id of this machine's leader.
    links : Links
        The links between the progress processes, which nothing else uses.
    end : callable
        Ends the job.
    """

    def __init__(
        self,
        own: Neighbour,
        others: Sequence[Neighbour],
        leader: int,
        links: Links,
        end: Callable[[], None],
    ) -> None:
        self._names: Mapping[int, str] | Sequence[str] = {
            one.machine: f"machine {one.host}" for one in (own, *others)
        }
        self._machine, self._leader, self._links, self._end = own.machine, leader, links, end
        self._watched = _between(own, others)
        for one in self._watched:
            enable_keepalive(one.descriptor)
        self._goodbyes = {
            one.machine: _Goodbye(links, one.machine) for one in self._watched if one.is_progress_process
        }
        self._next, self._continued = time.monotonic(), -math.inf  # the time of SIGCONT
        self._looked = -math.inf  # when it last looked for dead progress processes
        self._is_ending = self._has_reported = self._is_leaving = False
        self._handlers: dict[int, Any] = {}  # of signals, as they were before
        self._thread: SignalThread | None = None

    def name(self, names: Sequence[str]) -> None:
        """Let messages to users call the machines by these names, by their numbers."""
        self._names = names

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
        elif self._is_ending:
            self._is_ending = False
            self._report(self._dead())
            self.say_goodbye()  # now, because SIGKILL can come milliseconds after SIGTERM
        elif self._is_leaving and now > self._continued + _ENDED:
            self._announce(leaves=False)  # a user had stopped this process

    def report_when_ended(self) -> None:
        """Report lost machines if mpirun ends the job: it sends SIGCONT a moment before SIGTERM."""
        for number, handler in (signal.SIGCONT, self._begin_to_end), (signal.SIGTERM, self._be_ended):
            self._handlers[number] = signal.signal(number, handler)
        self._thread = SignalThread(signal.SIGCONT, _STUCK, self._report_if_stuck)

    def say_goodbye(self) -> None:
        """Tell the neighbouring progress processes that this one leaves and has not died."""
        if not self._is_leaving:
            self._announce(leaves=True)

    def stop(self) -> None:
        """Report nothing any more: the job comes to its end."""
        self._has_reported = self._is_leaving = True
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for goodbye in self._goodbyes.values():
            goodbye.cancel()

    def report(self) -> None:
        """Write a line for each machine that is lost, once."""
        causes = self._silent(_SUSPECT)
        if has_ended(self._leader):
            causes[self._machine] = "its first process has died"
        self._report(causes)

    def _announce(self, leaves: bool) -> None:
        self._is_leaving = leaves
        for machine in self._goodbyes:
            if not all(self._are_closed(machine, of_progress_process=True)):
                with contextlib.suppress(LostError):
                    self._links.send(machine, _GOODBYE, bytes([leaves]))

    def _begin_to_end(self, number: int, frame: Any) -> None:
        self.report()
        self._continued = time.monotonic()
        self._is_ending, self._next = True, self._continued + _DYING

    def _be_ended(self, number: int, frame: Any) -> None:
        self._report(self._dead())
        self.say_goodbye()
        signal.signal(number, self._handlers[number])
        os.kill(os.getpid(), number)

    def _report_if_stuck(self) -> None:
        """In a thread: report dead progress processes if MPI does not return."""
        # When a connection is reset, OpenMPI 4.1 tells mpirun, and waits until it is ended.
        if self._looked < time.monotonic() - _STUCK:
            closed = [
                one
                for one, goodbye in self._goodbyes.items()
                if all(self._are_closed(one, of_progress_process=True)) and not goodbye.has_arrived
            ]
            self._write(self._causes(closed))

    def _report(self, causes: Mapping[int, str]) -> None:
        if causes and not self._has_reported:
            self._write(causes)
            self.say_goodbye()  # however this process ends now

    def _write(self, causes: Mapping[int, str]) -> None:
        """Write a line for each lost machine, once."""
        if self._has_reported or not causes:
            return
        self._has_reported = True
        lines = [f"{self._names[machine]} was lost: {cause}\n" for machine, cause in causes.items()]
        with contextlib.suppress(OSError):  # the pipe has no reader
            os.write(2, "".join(lines).encode())

    def _silent(self, limit: float) -> dict[int, str]:
        """Return causes for the machines that have been silent for longer."""
        found: dict[int, float] = {}
        for one in self._watched:
            seconds = seconds_silent(one.descriptor, one.addresses)
            if limit < seconds < math.inf:
                found[one.machine] = max(seconds, found.get(one.machine, 0))
        return {
            machine: f"it has not answered for {seconds:.0f} seconds, so it has no power, or the "
            f"network to it is interrupted"
            for machine, seconds in found.items()
        }

    def _dead(self) -> dict[int, str]:
        """Return causes for the machines whose progress processes have died."""
        until = time.monotonic() + _ARRIVING
        while (dead := [one for one in self._goodbyes if self._is_dead(one)]) and (
            time.monotonic() < until
        ):
            time.sleep(_NAP)
        self._looked = time.monotonic()
        return self._causes(dead)

    def _causes(self, dead: Iterable[int]) -> dict[int, str]:
        return {
            machine: "all its connections were closed, so its processes have died"
            if all(self._are_closed(machine))
            else "its second process has died"
            for machine in dead
        }

    def _is_dead(self, machine: int) -> bool:
        """Whether a progress process closed its connections and no goodbye has arrived."""
        if not all(self._are_closed(machine, of_progress_process=True)):
            return False
        try:
            return not self._goodbyes[machine].was_said()
        except LostError:  # with ULFM, the job goes on without this progress process
            return all(self._are_closed(machine))

    def _are_closed(self, machine: int, of_progress_process: bool = False) -> list[bool]:
        return [
            seconds_silent(one.descriptor, one.addresses) == math.inf
            for one in self._watched
            if one.machine == machine and (one.is_progress_process or not of_progress_process)
        ]


class _Goodbye:
    """The last message of another machine's progress process: it leaves, or stays after all.

    Attributes
    ----------
    has_arrived : bool
        The last return value of `was_said`.
    """

    def __init__(self, links: Links, machine: int) -> None:
        self._links, self._machine = links, machine
        self._message = np.zeros(1, np.uint8)
        self.has_arrived = False
        self._receipt: Receipt | None = self._receive()

    def _receive(self) -> Receipt:
        return self._links.receive_into(self._machine, _GOODBYE, self._message)

    def was_said(self) -> bool:
        """Whether the last message that has arrived says so. Raise `LostError` if none can arrive."""
        while self._receipt is not None and self._receipt.is_complete():
            self.has_arrived, self._receipt = bool(self._message[0]), None
            with contextlib.suppress(LostError):  # with ULFM, after the progress process is gone
                self._receipt = self._receive()
        return self.has_arrived

    def cancel(self) -> None:
        if self._receipt is not None:
            self._receipt.cancel()


class _Connection(NamedTuple):
    """A connection of this process to a leader or a progress process of another machine."""

    machine: int
    is_progress_process: bool
    addresses: Addresses
    descriptor: int


def _between(own: Neighbour, others: Iterable[Neighbour]) -> list[_Connection]:
    """Return the connections between this process and others."""
    descriptors = connections()
    return [
        _Connection(other.machine, other.is_progress_process, (state, there), descriptors[state, there])
        for other in others
        for there, state in other.connections
        if (state, there) in descriptors and (state, there) in own.connections
    ]
