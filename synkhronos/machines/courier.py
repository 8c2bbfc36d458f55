"""The courier of a machine: a process that only communicates, while the ranks compute.

Objects that belong to no rank are in the commons of a machine. MPI makes progress only while a process
calls it, and a rank that computes does not. So a second task on each machine joins the commons of the
ranks. Until the leader ends, it does the `Work` that the leader requests, by which the couriers of all
machines exchange what their ranks need.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import time
from abc import ABC, abstractmethod
from typing import Any, Callable, NamedTuple, Protocol, Sequence

import numpy as np

from synkhronos._errors import SynkhronosError
from synkhronos.machines.links import Links, LostError
from synkhronos.machines.neighbours import Neighbours
from synkhronos.stores.commons import Commons, LockFile, SharedCommons, open_unnamed
from synkhronos.stores.memory import SharedMemory
from synkhronos.transports.children import has_ended
from synkhronos.transports.semaphore import NBYTES, Semaphore

_LEADER, _COURIER = 0, 1  # their ranks among the tasks of the machine
_TAG = 0
_IDLE = 0.02  # seconds between two checks for a message of the leader, which also wakes the courier
_NAP = 2e-4  # seconds
_CLOSING = 2.0  # seconds to wait for the end of the work

# Words of the table: the numbers of the work that the leader wants, of the work that uses the commons,
# of the latest work that the courier has seen, and of work that ended because another courier had died
_WANTED, _RUNNING, _SEEN, _FAILED = range(4)
_WORDS = 8


class WorkContext:
    """The objects with which the courier of a machine works.

    Attributes
    ----------
    commons : Commons
        The commons of this machine.
    links : Links
        The links between the couriers; the number of a machine is the rank of its courier.
    number : int
        The number of the work, the same on all machines.
    is_over : callable
        Whether the leader has ended the work, or has died.
    wait : callable
        ``wait(seconds)`` sleeps for at most this time. `Courier.wake` ends it.
    kept : dict
        State that a `Work` of this world leaves for later `Work`, by name.
    """

    def __init__(
        self,
        commons: Commons,
        links: Links,
        number: int,
        is_over: Callable[[], bool],
        wait: Callable[[float], Any] = time.sleep,
        kept: dict[str, Any] | None = None,
    ) -> None:
        self.commons, self.links, self.number = commons, links, number
        self.is_over, self.wait = is_over, wait
        self.kept = {} if kept is None else kept


class Work(Protocol):
    """A task of a courier. It is pickled."""

    def run(self, context: WorkContext) -> None:
        """Work until ``context.is_over()``."""


class Courier(ABC):
    """The leader's handle to the courier of its machine. `NaiveCourier` is the specification.

    Attributes
    ----------
    commons : Commons
        The objects that belong to no rank, for the ranks of this machine and its courier.
    """

    commons: Commons

    @abstractmethod
    def start(self, number: int, work: Work) -> None:
        """Let the courier work. The last work has stopped."""

    @abstractmethod
    def end(self) -> None:
        """Request the end of the work; it continues until `has_stopped`."""

    @abstractmethod
    def has_stopped(self) -> bool:
        """Whether no work uses the commons."""

    def check(self) -> None:  # noqa: B027
        """Raise `LostError` if couriers have died while they were needed."""

    def use_in_fork(self) -> None:  # noqa: B027
        """Called in a rank that was forked from the leader."""

    def close(self) -> None:
        """Let the work end, at the end of the world, and wait for it."""
        self.end()


class NoCourier(Courier):
    """A placeholder where there is no courier. Programs cannot use objects that belong to no rank."""

    commons = None  # type: ignore[assignment]  # the transport looks for it

    def start(self, number: int, work: Work) -> None:
        pass

    def end(self) -> None:
        pass

    def has_stopped(self) -> bool:
        return True


class Address(NamedTuple):
    """Where another process finds the files of `JointCommons`."""

    pid: int
    memory: int
    locks: int


class JointCommons(SharedCommons):
    """Commons that can be joined by a process that was not forked from their creator.

    Their memory and their locks are files without names. A process of the same user opens them by the
    process id of their creator and the numbers of its descriptors.

    Parameters
    ----------
    address : Address, optional
        The address of the commons to join. By default, new commons are created.

    Attributes
    ----------
    address : Address
        The address of the commons.
    """

    def __init__(self, address: Address | None = None) -> None:
        if address is None:
            self._memory_file = open_unnamed("synkhronos-commons")
            locks = open_unnamed("synkhronos-locks")
            self.address = Address(os.getpid(), self._memory_file.fileno(), locks.fileno())
        else:
            self._memory_file, locks = (
                open(f"/proc/{address.pid}/fd/{number}", "r+b", buffering=0) for number in address[1:]
            )
            self.address = address
        super().__init__(SharedMemory(1, self._memory_file.fileno()), LockFile(locks))

    def use_in_fork(self) -> None:
        """Called in a process that was forked from a rank and is itself a rank."""
        self.memory.use_span(0)  # nothing is allocated from it

    def close(self) -> None:
        super().close()
        self._memory_file.close()


class TaskCourier(Courier):
    """A courier that is another task of the MPI job. It joins the commons when it is first needed.

    Parameters
    ----------
    links : Links
        The links between the tasks of this machine.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self.commons = JointCommons()
        memory = self.commons.memory
        table, bell = memory.allocate(8 * _WORDS), memory.allocate(NBYTES)
        self._table, self._bell = table.view(np.int64), Semaphore(array=bell)
        self._table[:] = 0
        self._world = _World(
            next(_worlds), self.commons.address, memory.offset(table), memory.offset(bell)
        )
        self._started = 0

    def start(self, number: int, work: Work) -> None:
        self._table[_WANTED] = self._started = number
        content = self._world, number, pickle.dumps(work)
        self._links.send(_COURIER, _TAG, pickle.dumps(content))
        self._bell.post()

    def end(self) -> None:
        self._table[_WANTED] = 0
        self._bell.post()

    def has_stopped(self) -> bool:
        return self._table[_SEEN] == self._started and not self._table[_RUNNING]

    def check(self) -> None:
        if self._table[_FAILED]:
            raise LostError(["the second task of another machine"])
        if self._table[_WANTED]:
            self._links.receive(_COURIER, _TAG)  # no message, but this raises if it has died

    def use_in_fork(self) -> None:
        self.commons.use_in_fork()  # type: ignore[attr-defined]  # `JointCommons`

    def close(self) -> None:
        self.end()
        until = time.monotonic() + _CLOSING
        while not (self.has_stopped() or self._links.lost()) and time.monotonic() < until:
            time.sleep(_NAP)


class _World(NamedTuple):
    """A world of the leader, and where a courier finds its commons, the table and the bell.

    Attributes
    ----------
    number : int
        Numbers the worlds of the leader.
    address : Address
        The address of the commons.
    table, bell : int
        Offsets in the memory of the commons.
    """

    number: int
    address: Address
    table: int
    bell: int


_worlds = itertools.count()


def send_home(links: Links) -> None:
    """Let the courier of this machine leave `serve`, if it is alive."""
    with contextlib.suppress(LostError):
        links.send(_COURIER, _TAG, pickle.dumps(None))


def send_names(links: Links, names: Sequence[str]) -> None:
    """Tell the courier of this machine, if it is alive, the names of the machines in messages."""
    with contextlib.suppress(LostError):
        links.send(_COURIER, _TAG, pickle.dumps(list(names)))


def serve(here: Links, couriers: Links, neighbours: Neighbours) -> None:
    """Run as the courier of this machine until `send_home`.

    Parameters
    ----------
    here : Links
        The links between the tasks of this machine.
    couriers : Links
        The links between the couriers of all machines.
    neighbours : Neighbours
        The machines next to this one.

    Raises
    ------
    LostError
        If the leader has died.
    """
    neighbours.report_when_ended()
    try:
        _serve(here, couriers, neighbours)
        neighbours.say_goodbye()
    except LostError:
        neighbours.report()
        raise
    finally:
        neighbours.stop()


def _serve(here: Links, couriers: Links, neighbours: Neighbours) -> None:
    joined: _Joined | None = None
    while True:
        neighbours.check()
        received = here.receive(_LEADER, _TAG)
        if received is None:
            joined.wait() if joined else time.sleep(_IDLE)
            continue
        content = pickle.loads(received[1])
        if content is None:
            return
        if isinstance(content, list):
            neighbours.name(content)
            continue
        world, number, work = content
        if joined is None or joined.world.number != world.number:
            if joined is not None:
                joined.commons.close()
            joined = _join(world)
        if joined is not None:
            joined.run(here, couriers, neighbours, number, work)


def _join(world: _World) -> _Joined | None:
    """Return the world of a leader; None if the leader has died."""
    try:
        return _Joined(world)
    except OSError as error:
        if has_ended(world.address.pid):
            return None
        raise SynkhronosError(
            f"the second task on this machine cannot open the memory of the first: {error}; start both "
            f"as the same user, in the same container, and let processes of a user open each other's "
            f"files in /proc"
        ) from error


class _Joined:
    """The memory of the world to which this machine's ranks belong."""

    def __init__(self, world: _World) -> None:
        self.world, self.commons = world, JointCommons(world.address)
        mapping = self.commons.memory.mapping
        self._table: np.ndarray = np.ndarray(_WORDS, np.int64, mapping, world.table)
        self.bell = Semaphore(array=np.ndarray(NBYTES, np.uint8, mapping, world.bell), is_new=False)
        self._kept: dict[str, Any] = {}

    def wait(self) -> None:
        """Wait for a message of the leader."""
        wanted = self._table[_WANTED]
        is_on_its_way = wanted and wanted != self._table[_SEEN]  # the bell comes before the message
        self.bell.wait(_NAP if is_on_its_way else _IDLE)

    def run(
        self, here: Links, couriers: Links, neighbours: Neighbours, number: int, work: bytes
    ) -> None:
        table = self._table

        def is_over() -> bool:
            neighbours.check()
            return table[_WANTED] != number or bool(here.lost())  # the leader

        context = WorkContext(self.commons, couriers, number, is_over, self.bell.wait, self._kept)
        table[_RUNNING] = table[_SEEN] = number
        try:
            if not context.is_over():
                pickle.loads(work).run(context)
        except LostError:  # the leaders then end the world
            table[_FAILED] = number
        finally:
            self.commons.release_locks()
            table[_RUNNING] = 0
