"""The progress process of a machine: a process that only communicates, while the ranks compute.

Objects that belong to no rank are in the named memory of a machine. MPI makes progress only while a
process calls it, and a rank that computes does not. So a second task on each machine joins the named
memory of the ranks. Until the leader ends, it does the `Work` that the leader requests, by which the
progress processes of all machines exchange what their ranks need.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import time
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple, Protocol

import numpy as np

from synkhronos._errors import SynkhronosError
from synkhronos.machines.leaders import Links, LostError
from synkhronos.machines.neighbours import Neighbours
from synkhronos.stores.named_memory import JointNamedMemory, NamedMemory
from synkhronos.transports.children import has_ended
from synkhronos.transports.waiting import NBYTES, Semaphore

_LEADER, _PROGRESS_PROCESS = 0, 1  # their ranks among the tasks of the machine
_TAG = 0
_IDLE = 0.02  # seconds between two checks for a message of the leader, which also rings the bell
_NAP = 2e-4  # seconds
_CLOSING = 2.0  # seconds to wait for the end of the work

# Words of the table: the numbers of the work that the leader wants, of the work that uses the named
# memory, of the latest work that the progress process has seen, and of work that ended because another
# progress process had died
_WANTED, _RUNNING, _SEEN, _FAILED = range(4)
_WORDS = 8


@dataclass(frozen=True)
class WorkContext:
    """The objects with which the progress process of a machine works.

    Attributes
    ----------
    named_memory : NamedMemory
        The named memory of this machine.
    links : Links
        The links between the progress processes; the number of a machine is the rank of its progress
        process.
    number : int
        The number of the work, the same on all machines.
    is_over : callable
        Whether the leader has ended the work, or has died.
    wait : callable
        ``wait(seconds)`` sleeps for at most this time. `ProgressProcess.wake` ends it.
    kept : dict
        State that a `Work` of this world leaves for later `Work`, by name.
    """

    named_memory: NamedMemory
    links: Links
    number: int
    is_over: Callable[[], bool]
    wait: Callable[[float], Any] = time.sleep
    kept: dict[str, Any] = field(default_factory=dict)


class Work(Protocol):
    """A task of a progress process. It is pickled."""

    def run(self, context: WorkContext) -> None:
        """Work until ``context.is_over()``."""


class ProgressProcess:
    """The leader's handle to its machine's progress process, here to none.

    Attributes
    ----------
    named_memory : NamedMemory or None
        The objects that belong to no rank, for the ranks of this machine and its progress process.
        Without a progress process, programs cannot use such objects.
    """

    named_memory: Any = None

    def start(self, number: int, work: Work) -> None:
        """Let the progress process work. The last work has stopped."""

    def end(self) -> None:
        """Request the end of the work; it continues until `has_stopped`."""

    def has_stopped(self) -> bool:
        """Whether no work uses the named memory."""
        return True

    def finish(self, wait: Callable[[Callable[[], Any]], Any]) -> None:
        """End the work, and wait until it has stopped by ``wait(ready)``."""
        self.end()
        wait(self.has_stopped)

    def check(self) -> None:
        """Raise `LostError` if progress processes have died while they were needed."""

    def use_in_fork(self) -> None:
        """Called in a rank that was forked from the leader."""

    def close(self) -> None:
        """Let the work end, at the end of the world, and wait for it."""
        self.end()


class TaskProgressProcess(ProgressProcess):
    """A progress process that is a task of the MPI job. It joins the named memory when first needed.

    Parameters
    ----------
    links : Links
        The links between the tasks of this machine.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self.named_memory = JointNamedMemory(1)
        memory = self.named_memory.memory
        table, bell = memory.allocate(8 * _WORDS), memory.allocate(NBYTES)
        self._table, self._bell = table.view(np.int64), Semaphore(array=bell)
        self._table[:] = 0
        self._world = _World(
            next(_worlds),
            os.getpid(),
            tuple(file.fileno() for file in self.named_memory.files),
            memory.offset(table),
            memory.offset(bell),
        )
        self._started = 0

    def start(self, number: int, work: Work) -> None:
        self._table[_WANTED] = self._started = number
        content = self._world, number, pickle.dumps(work)
        self._links.send(_PROGRESS_PROCESS, _TAG, pickle.dumps(content))
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
            self._links.receive(_PROGRESS_PROCESS, _TAG)  # no message, but this raises if it has died

    def use_in_fork(self) -> None:
        self.named_memory.memory.use_span(0)  # nothing is allocated from it

    def close(self) -> None:
        self.end()
        until = time.monotonic() + _CLOSING
        while not (self.has_stopped() or self._links.lost()) and time.monotonic() < until:
            time.sleep(_NAP)


class _World(NamedTuple):
    """A world of the leader, and where to find its named memory, the table and the bell.

    Attributes
    ----------
    number : int
        Numbers the worlds of the leader.
    pid : int
        The process of the leader.
    files : tuple of int
        The numbers of its descriptors of the files of the named memory.
    table, bell : int
        Offsets in the memory of the named memory.
    """

    number: int
    pid: int
    files: tuple[int, ...]
    table: int
    bell: int


_worlds = itertools.count()


def tell(links: Links, names: list[str] | None) -> None:
    """Tell the progress process of this machine, if it is alive, how messages call the machines.

    None lets it leave `serve`.
    """
    with contextlib.suppress(LostError):
        links.send(_PROGRESS_PROCESS, _TAG, pickle.dumps(names))


def serve(here: Links, progress_processes: Links, neighbours: Neighbours) -> None:
    """Run as the progress process of this machine until `tell` says so.

    Parameters
    ----------
    here : Links
        The links between the tasks of this machine.
    progress_processes : Links
        The links between the progress processes of all machines.
    neighbours : Neighbours
        The machines next to this one.

    Raises
    ------
    LostError
        If the leader has died.
    """
    neighbours.start()
    try:
        _serve(here, progress_processes, neighbours)
    except LostError:
        neighbours.report()
        raise
    finally:
        neighbours.stop()


def _serve(here: Links, progress_processes: Links, neighbours: Neighbours) -> None:
    joined: _Joined | None = None
    while True:
        received = here.receive(_LEADER, _TAG)
        if received is None:
            joined.wait() if joined else time.sleep(_IDLE)
            continue
        content = pickle.loads(received[1])
        if content is None:
            return
        if isinstance(content, list):
            neighbours.names = content
            continue
        world, number, work = content
        if joined is None or joined.world.number != world.number:
            if joined is not None:
                joined.named_memory.close()
            joined = _join(world)
        if joined is not None:
            joined.run(here, progress_processes, number, work)


def _join(world: _World) -> _Joined | None:
    """Return the world of a leader; None if the leader has died."""
    try:
        return _Joined(world)
    except OSError as error:
        if has_ended(world.pid):
            return None
        raise SynkhronosError(
            f"the second task on this machine cannot open the memory of the first: {error}; start both "
            f"as the same user, in the same container, and let processes of a user open each other's "
            f"files in /proc"
        ) from error


class _Joined:
    """The memory of the world to which this machine's ranks belong."""

    def __init__(self, world: _World) -> None:
        paths = [f"/proc/{world.pid}/fd/{number}" for number in world.files]
        files = [open(path, "r+b", buffering=0) for path in paths]
        self.world, self.named_memory = world, JointNamedMemory(1, files)
        mapping = self.named_memory.memory.mapping
        self._table: np.ndarray = np.ndarray(_WORDS, np.int64, mapping, world.table)
        self.bell = Semaphore(array=np.ndarray(NBYTES, np.uint8, mapping, world.bell), is_new=False)
        self._kept: dict[str, Any] = {}

    def wait(self) -> None:
        """Wait for a message of the leader."""
        wanted = self._table[_WANTED]
        is_on_its_way = wanted and wanted != self._table[_SEEN]  # the bell comes before the message
        self.bell.wait(_NAP if is_on_its_way else _IDLE)

    def run(self, here: Links, progress_processes: Links, number: int, work: bytes) -> None:
        table = self._table

        def is_over() -> bool:
            return table[_WANTED] != number or bool(here.lost())  # the leader

        context = WorkContext(
            self.named_memory, progress_processes, number, is_over, self.bell.wait, self._kept
        )
        table[_RUNNING] = table[_SEEN] = number
        try:
            if not context.is_over():
                pickle.loads(work).run(context)
        except LostError:  # the leaders then end the world
            table[_FAILED] = number
        finally:
            self.named_memory.release_locks()
            table[_RUNNING] = 0
