"""Messages between leaders by MPI, through mpi4py, which only this module imports.

MPI makes progress only while one of its functions is called, so a leader polls while it waits.

Above a limit, 64 kB over TCP, OpenMPI sends the first bytes of a message, and the rest after the
receiver has answered. For messages that are a few times as long, several shorter messages are faster, so
they are sent in pieces, and so are messages of 1 GiB or more. All pieces but the last have the same
length; the last is shorter, and may be empty.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import time
from typing import TYPE_CHECKING, Any, Collection, Iterable, Sequence

from mpi4py import rc

from synkhronos.machines.job import ending
from synkhronos.machines.leaders import Links, LostError, Receipt, as_bytes
from synkhronos.machines.neighbours import Neighbour, Neighbours, connections

rc.initialize = rc.finalize = False

from mpi4py import MPI  # noqa: E402

if TYPE_CHECKING:
    import numpy as np

_PIECE = 62 << 10  # bytes
_MOST_IN_PIECES = 6 * _PIECE
_CHUNK = 1 << 30  # bytes; MPI counts are C ints
_NAP = 0.02  # seconds
_LOST = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
_LEADER, _PROGRESS_PROCESS, _OTHER = range(3)  # the role of a task on its machine
_TOGETHER = 1  # a tag: the remaining tasks meet again


def initialize() -> None:
    """Initialize MPI if necessary. It waits until every process of the job does so."""
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
    ending.end_watch()


def abort() -> None:
    """End all tasks of the job, with exit code 1."""
    if MPI.Is_initialized():
        MPI.COMM_WORLD.Abort(1)


class MpiLinks(Links):
    """The messages of a communicator, which must not be used for anything else.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        The communicator.
    names : sequence of str, optional
        How messages refer to its tasks.
    """

    def __init__(self, comm: MPI.Comm, names: Sequence[str] = ()) -> None:
        self._comm, self.names = comm, names
        self.rank, self.size = comm.rank, comm.size
        self._numbers = itertools.count()
        # By number: the requests, and the memory
        self._sending: dict[int, tuple[list[MPI.Request], Any]] = {}
        # By source and tag: the pieces of the message that is being received
        self._pieces: dict[tuple[int, int], list[bytearray]] = {}
        # By source, which may be any, and tag: a message for which there was no memory
        self._matched: dict[tuple[int | None, int], tuple[Any, MPI.Status]] = {}
        self._pid = os.getpid()

    def lost(self) -> Collection[int]:
        return failed_in(self._comm)

    def acknowledge(self) -> None:
        self._comm.Ack_failed()

    def _or_lost(self, error: MPI.Exception) -> Exception:
        """Return a `LostError` in place of an MPI error that says that tasks have died."""
        return self.lost_error() if error.Get_error_class() in _LOST else error

    def send(self, to: int, tag: int, data: bytes | np.ndarray) -> int:
        self._forget_sent()
        view = as_bytes(data)
        try:
            requests = [self._comm.Isend([piece, MPI.BYTE], to, tag) for piece in _pieces_of(view)]
        except MPI.Exception as error:
            raise self._or_lost(error) from None
        number = next(self._numbers)
        if not _are_over(requests):  # a short message is sent at once
            self._sending[number] = requests, data
        return number

    def is_sent(self, number: int) -> bool:
        sending = self._sending.get(number)
        if sending is not None and _are_over(sending[0]):
            del self._sending[number]
        return number not in self._sending

    def _forget_sent(self) -> None:
        for number in list(self._sending):
            self.is_sent(number)

    def receive(self, source: int | None, tag: int) -> tuple[int, bytes | bytearray] | None:
        while (received := self._receive_piece(source, tag)) is not None:
            sender, piece = received
            pieces = self._pieces.setdefault((sender, tag), [])
            pieces.append(piece)
            if len(piece) != len(pieces[0]) or len(piece) not in (_PIECE, _CHUNK):
                del self._pieces[sender, tag]
                return sender, piece if len(pieces) == 1 else b"".join(pieces)
        return None

    def _receive_piece(self, source: int | None, tag: int) -> tuple[int, bytearray] | None:
        message, status = self._matched.pop((source, tag), (None, MPI.Status()))
        try:
            if message is None:
                message = self._comm.Improbe(MPI.ANY_SOURCE if source is None else source, tag, status)
            if message is None:
                return None
            try:
                data = bytearray(status.Get_count(MPI.BYTE))
            except MemoryError:
                self._matched[source, tag] = message, status  # for the next call
                raise
            message.Recv([data, MPI.BYTE], status)
        except MPI.Exception as error:
            raise self._or_lost(error) from None
        return status.Get_source(), data

    def receive_into(self, source: int, tag: int, array: np.ndarray) -> Receipt:
        view = as_bytes(array)
        try:
            requests = [self._comm.Irecv([piece, MPI.BYTE], source, tag) for piece in _pieces_of(view)]
        except MPI.Exception as error:
            raise self._or_lost(error) from None
        return _MpiReceipt(self, requests)

    def discard(self, tag: int) -> None:
        while self._receive_piece(None, tag) is not None:
            pass
        for key in [key for key in self._pieces if key[1] == tag]:
            del self._pieces[key]


def _pieces_of(view: np.ndarray) -> list[np.ndarray]:
    """Return views of the parts of a message, each of which is one MPI message."""
    step = _PIECE if _PIECE <= view.size <= _MOST_IN_PIECES else _CHUNK
    return [view[start : start + step] for start in range(0, view.size + 1, step)]


class _MpiReceipt(Receipt):
    def __init__(self, links: MpiLinks, requests: list[MPI.Request]) -> None:
        self._links, self._requests = links, requests

    def is_complete(self) -> bool:
        requests = self._requests
        try:
            while requests and requests[-1].Test():  # the last piece mostly arrives last
                requests.pop()
        except MPI.Exception as error:
            raise self._links._or_lost(error) from None
        return not requests

    def cancel(self) -> None:
        # MPI matches a piece that arrives meanwhile to the first remaining request, its own one.
        for request in reversed(self._requests):
            if request != MPI.REQUEST_NULL and not _are_over([request]):
                try:
                    request.Cancel()
                    request.Wait()
                except MPI.Exception as error:  # its sender has died meanwhile, so it is over as well
                    if error.Get_error_class() not in _LOST:
                        raise


def _are_over(requests: Iterable[MPI.Request]) -> bool:
    """Whether none of these requests uses its memory any more. Some may have failed."""
    try:
        return all([request.Test() for request in requests])
    except MPI.Exception as error:
        if error.Get_error_class() not in _LOST:
            raise
    return all([request == MPI.REQUEST_NULL for request in requests])


def failed_in(comm: MPI.Comm) -> Collection[int]:
    """Return the ranks in a communicator that are known to have died."""
    failed = comm.Get_failed()
    return MPI.Group.Translate_ranks(failed, range(failed.size), comm.group) if failed.size else ()


def _neighbours(tasks: MPI.Comm, leader: int) -> Neighbours | None:
    """In each progress process: return the watch over the machines before and after its own in a ring.

    The leaders take part. `tasks` are the leader and the progress process of each machine, one after the
    other.
    """
    machine, role = divmod(tasks.rank, 2)
    next_to = {(machine + step) % (tasks.size // 2) for step in (-1, 1)} - {machine}
    roles = (_LEADER, _PROGRESS_PROCESS) if role == _PROGRESS_PROCESS else (_PROGRESS_PROCESS,)
    others = [2 * item + other for item in sorted(next_to) for other in roles]
    _exchange(tasks, others, None)  # MPI connects two tasks when one sends something
    is_progress_process, host = role == _PROGRESS_PROCESS, socket.gethostname()
    own = Neighbour(machine, is_progress_process, host, list(connections()), ending.is_beside_mpirun())
    known = _exchange(tasks, others, own)
    if role == _LEADER:
        return None
    return Neighbours(own, known, leader, lambda: _end_job(leader))


def _exchange(comm: MPI.Comm, others: Sequence[int], item: Any) -> list[Any]:
    """Return the items of other tasks, which get this task's one."""
    requests = [comm.isend(item, other) for other in others]
    items = [comm.recv(source=other) for other in others]
    MPI.Request.waitall(requests)
    return items


def _end_job(leader: int) -> None:
    """End the job where machines do not answer; `abort` would wait for them."""
    starter = ending.find_starter()
    if starter is None:
        abort()
    else:
        ending.end_job(starter, [leader, os.getpid()])


class Tasks:
    """The tasks of an MPI job and their machines. The first task of each machine leads it.

    Parameters
    ----------
    apart : int
        If not 0, this many consecutive tasks count as a machine.

    Attributes
    ----------
    links : MpiLinks or None
        The links between leaders, if this task leads a machine.
    local : MpiLinks or None
        The links between the tasks of this machine, for the leader and the progress process, which are
        its first two tasks. None unless each machine has a progress process.
    progress_processes : MpiLinks or None
        The links between the progress processes of all machines, if this task is one of them.
    neighbours : Neighbours or None
        The machines next to this one, if this task is a progress process.
    tasks_here : int
        The number of tasks on this machine.
    cores : set of int
        The cores of all tasks on this machine: mpirun and srun bind each task to some.
    """

    links: Any  # `MpiLinks` or None; these are used only by tasks whose role has them
    local: Any
    progress_processes: Any
    neighbours: Any

    def __init__(self, apart: int) -> None:
        initialize()
        self._world: MPI.Comm = MPI.COMM_WORLD
        world = self._world
        if apart:
            local = world.Split(world.rank // apart)
        else:
            local = world.Split_type(MPI.COMM_TYPE_SHARED)
        self._machine = local.allreduce(world.rank, MPI.MIN)
        self._role = min(local.rank, _OTHER)
        self._connect()

    def _connect(self) -> None:
        world, role = self._world, self._role
        local = world.Split(self._machine)
        roles, pids = zip(*local.allgather((role, os.getpid())))
        self.tasks_here = local.size
        self.cores = set().union(*local.allgather(os.sched_getaffinity(0)))
        leaders = world.Split(0 if role == _LEADER else MPI.UNDEFINED)
        progress_processes = world.Split(0 if role == _PROGRESS_PROCESS else MPI.UNDEFINED)
        have_progress_processes = world.allreduce(roles[:2] == (_LEADER, _PROGRESS_PROCESS), MPI.LAND)
        takes_part = have_progress_processes and role in (_LEADER, _PROGRESS_PROCESS)
        self._local = MpiLinks(
            local, [f"task {index} of {socket.gethostname()}" for index in range(local.size)]
        )
        self.links = MpiLinks(leaders) if role == _LEADER else None
        self.local = self._local if takes_part else None
        self.progress_processes = (
            MpiLinks(progress_processes)
            if have_progress_processes and role == _PROGRESS_PROCESS
            else None
        )
        tasks = world.Split(0 if takes_part else MPI.UNDEFINED, 2 * self._machine + role)
        self.neighbours = _neighbours(tasks, pids[_LEADER]) if takes_part else None
        self._end = world.Dup()

    def finish(self, limit: float = math.inf) -> bool:
        """Wait until every task calls this method, without using a core; then finalize MPI.

        Return False if they have not after `limit` seconds.

        Raises
        ------
        LostError
            If tasks have died.
        """
        self._check_all_live()
        request, until = self._end.Ibarrier(), time.monotonic() + limit
        while not _are_over([request]):
            if time.monotonic() > until:
                return False
            time.sleep(_NAP)
            self._check_all_live()  # the request need not know of deaths
        if self._world == MPI.COMM_WORLD:  # otherwise some have died, and it might wait for them
            MPI.Finalize()
        return True

    def _check_all_live(self) -> None:
        if self.have_died():
            raise LostError(["another task"])

    # After tasks have died, with ULFM

    def have_died(self) -> bool:
        """Whether tasks of the job are known to have died since the others met."""
        return bool(failed_in(self._world))

    def has_script_died(self) -> bool:
        """Whether the first task of the job, which runs the script, is known to have died."""
        return 0 in failed_in(self._world)

    def call_together(self) -> None:
        """Leader: let the other tasks of this machine leave `wait_for_leader`."""
        for task in range(1, self.tasks_here):
            with contextlib.suppress(LostError):
                self._local.send(task, _TOGETHER, b"")

    def wait_for_leader(self) -> None:
        """Wait until the leader of this machine calls. Raise `LostError` if it has died."""
        while self._local.receive(0, _TOGETHER) is None:
            time.sleep(_NAP)

    def meet_again(self) -> None:
        """Continue with the remaining tasks. All of them must call this method; it waits for them."""
        is_connected = False
        while not is_connected:
            self._world = self._world.Shrink()
            try:
                self._connect()
                is_connected = True
            except MPI.Exception:  # another task has died
                self._world.Revoke()
            is_connected = bool(self._world.Agree(is_connected))
