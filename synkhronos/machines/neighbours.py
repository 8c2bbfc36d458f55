"""How a progress process watches the machines next to its own, by its TCP connections to them.

A progress process does not compute, so it sees what a leader in a long call cannot. The progress
processes form a ring, so each machine is watched by two others, however many there are. A progress
process watches the connections that MPI has opened to the leader and the progress process of the other
machine. The kernels of both machines send packets on them every second, and close them when the
processes end. The kernel of the other machine answers, even if the process there computes, waits or is
stopped. So silence means that the machine, or the network, has failed.

Whoever sees that a machine is silent ends the job. A closed connection is seen by mpirun, too, which
ends the job, if it cannot go on: it sends SIGCONT to all processes, and kills them half a second later
or more. So a machine whose connections are closed soon after SIGCONT has lost its processes before. A
thread looks, because a call of MPI may not return: when a connection is reset, OpenMPI 4.1 tells mpirun,
and waits until it is ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import struct
import threading
import time
from typing import Any, Callable, Collection, Iterable, Iterator, Mapping, NamedTuple, Sequence, Tuple

from synkhronos.host.handler_errors import suppress
from synkhronos.host.signals import do_nothing
from synkhronos.transports.children import has_ended

LIMIT = 3.0  # seconds of silence for which a machine counts as lost
_SUSPECT = 2.0  # the same, if mpirun ends the job
_CHECK_INTERVAL = 0.25  # seconds
_DYING = 0.3  # seconds from SIGCONT until a machine whose processes have died has closed a connection
_CLOSING = 0.1  # seconds until it has closed the others
_NAP = 0.02  # seconds

#: The addresses of a connection: of this side, and of the other one
Addresses = Tuple[Tuple[Any, ...], Tuple[Any, ...]]

_INTERVAL = 1  # seconds between two questions of the kernel to a silent other side
_MOST_QUESTIONS = 127  # the largest number, so that the kernel does not close the connection itself
_ESTABLISHED = 1
_INFO = struct.Struct("=8B24I")  # the beginning of the kernel's struct tcp_info
_STATE, _RETRANSMITS, _QUESTIONS, _LAST_SENT, _LAST_ANSWER = 0, 2, 3, 8 + 9, 8 + 12
_WAY = 500  # milliseconds, longer than the way there and back


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
    is_beside_mpirun : bool
        Whether mpirun itself has started the process, and not one of its daemons.
    """

    machine: int
    is_progress_process: bool
    host: str
    connections: Collection[Addresses]
    is_beside_mpirun: bool = False


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
    end : callable
        Ends the job. It is called in a thread.

    Attributes
    ----------
    names : sequence or mapping of str
        How messages to users call the machines, by their numbers.
    """

    def __init__(
        self, own: Neighbour, others: Sequence[Neighbour], leader: int, end: Callable[[], None]
    ) -> None:
        self.names: Mapping[int, str] | Sequence[str] = {
            other.machine: f"machine {other.host}" for other in (own, *others)
        }
        self._machine, self._leader, self._end = own.machine, leader, end
        self._watched = _between(own, others)
        for item in self._watched:
            enable_keepalive(item.descriptor)
        self._of_mpirun = next((other.machine for other in others if other.is_beside_mpirun), None)
        self._has_reported = False

    def start(self) -> None:
        """Begin to watch, in a thread."""
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._former = (
            signal.signal(signal.SIGCONT, do_nothing),
            signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False),
        )
        threading.Thread(target=self._watch, args=[reader], daemon=True).start()

    def stop(self) -> None:
        """Report nothing any more: the job comes to its end."""
        self._has_reported = True
        handler, descriptor = self._former
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGCONT, handler)
        os.close(self._writer)

    def _watch(self, reader: int) -> None:
        with open(reader, "rb", buffering=0) as signals:
            while True:
                number = (
                    signals.read(1) if select.select([signals], [], [], _CHECK_INTERVAL)[0] else None
                )
                if number == b"":
                    return
                if number == bytes([signal.SIGCONT]):
                    self.report()
                    self._report(self._closed())
                silent = self._silent(LIMIT)
                if silent and not self._has_reported:
                    self._report(silent)
                    self._end()

    def report(self) -> None:
        """Write a line for each machine that is lost, once."""
        causes = self._silent(_SUSPECT)
        # The parent of the script, which is on the first machine, tells more.
        if self._machine > 0 and has_ended(self._leader):
            causes[self._machine] = "its first process has died"
        self._report(causes)

    def _report(self, causes: Mapping[int, str]) -> None:
        if causes and not self._has_reported:
            self._has_reported = True
            lines = [f"{self.names[machine]} was lost: {cause}\n" for machine, cause in causes.items()]
            with contextlib.suppress(OSError):  # the pipe has no reader
                os.write(2, "".join(lines).encode())

    def _silent(self, limit: float) -> dict[int, str]:
        """Return causes for the machines that have been silent for longer."""
        found: dict[int, float] = {}
        for item in self._watched:
            seconds = seconds_silent(item.descriptor, item.addresses)
            if limit < seconds < math.inf:
                found[item.machine] = max(seconds, found.get(item.machine, 0))
        return {
            machine: f"it has not answered for {seconds:.0f} seconds, so it has no power, or the "
            f"network to it is interrupted"
            for machine, seconds in found.items()
        }

    def _closed(self) -> dict[int, str]:
        """Return causes for the machines whose progress processes die at this time."""
        # OpenMPI 4.1's mpirun ends the processes of its own machine before it tells its daemons.
        until = time.monotonic() + _DYING
        while not (dead := self._without(True)) and time.monotonic() < until:
            time.sleep(_NAP)
        time.sleep(_CLOSING if dead else 0)
        gone = self._without(False)
        return {
            machine: "all its connections were closed, so its processes have died"
            if machine in gone
            else "its second process has died"
            for machine in self._without(True)
        }

    def _without(self, progress_process: bool) -> set[int]:
        """Return the machines without a connection, to any process or to the progress process."""
        considered = [
            item
            for item in self._watched
            if (item.is_progress_process or not progress_process) and item.machine != self._of_mpirun
        ]
        open_to = {
            item.machine
            for item in considered
            if seconds_silent(item.descriptor, item.addresses) < math.inf
        }
        return {item.machine for item in considered} - open_to


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
        _Connection(other.machine, other.is_progress_process, (near, far), descriptors[near, far])
        for other in others
        for far, near in other.connections
        if (near, far) in descriptors and (near, far) in own.connections
    ]


# The TCP connections of this process, whoever has opened them


def connections() -> dict[Addresses, int]:
    """Return the file descriptors of the TCP connections of this process, by their addresses."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _copy(int(name)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                found[_addresses(connection)] = int(name)
    return found


def enable_keepalive(descriptor: int) -> None:
    """Let the kernel ask the other side of a connection every second, if nothing comes from it."""
    with _copy(descriptor) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, _INTERVAL),
            (socket.TCP_KEEPINTVL, _INTERVAL),
            (socket.TCP_KEEPCNT, _MOST_QUESTIONS),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def seconds_silent(descriptor: int, addresses: Addresses) -> float:
    """Return for how many seconds the other side has not answered, though something was sent to it.

    Return infinity if the connection has been closed by one of both sides.
    """
    try:
        with _copy(descriptor) as connection:
            if _addresses(connection) != addresses:  # another connection has this number now
                return math.inf
            data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return math.inf
    info = _INFO.unpack(data)
    if info[_STATE] != _ESTABLISHED:
        return math.inf
    # While the process over there does not read, this kernel repeats its data more and more rarely. So
    # silence counts only if the last packet has no answer.
    is_waiting = info[_RETRANSMITS] and _WAY < info[_LAST_SENT] < info[_LAST_ANSWER]
    return info[_LAST_ANSWER] / 1000 if is_waiting or info[_QUESTIONS] > 1 else 0.0


@contextlib.contextmanager
def _copy(descriptor: int) -> Iterator[socket.socket]:
    """A socket with a descriptor of its own; raises `OSError` if it is not a socket."""
    if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
        raise OSError(f"{descriptor} is not a socket")
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        yield copy


def _addresses(connection: socket.socket) -> Addresses:
    return connection.getsockname()[:2], connection.getpeername()[:2]
