"""Messages between leaders by MPI, through mpi4py, which only this module imports.

MPI works only while one of its functions is called, so a leader polls while it waits.
"""

from __future__ import annotations

import itertools
import math
import os
import time

from mpi4py import rc

from synkhronos.transports.machines.links import LONGEST, Links, Receipt, as_bytes

rc.initialize = rc.finalize = False

from mpi4py import MPI  # noqa: E402

_CHUNK = LONGEST  # bytes; MPI counts are C ints
_NAP = 0.02  # seconds


def initialize() -> None:
    """Initialize MPI, if it is not. It waits until every process of the job does so."""
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_SERIALIZED)


def abort() -> None:
    """End all tasks of the job, with exit code 1."""
    if MPI.Is_initialized():
        MPI.COMM_WORLD.Abort(1)


class MpiLinks(Links):
    """The messages of a communicator, which must not be used for anything else.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
    """

    def __init__(self, comm):
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._numbers = itertools.count()
        self._sending = {}  # by number: the requests, and the memory
        self._pid = os.getpid()

    def send(self, to, tag, data):
        self._forget_sent()
        view = as_bytes(data)
        requests = [
            self._comm.Isend([view[start : start + _CHUNK], MPI.BYTE], to, tag)
            for start in range(0, max(view.size, 1), _CHUNK)
        ]
        number = next(self._numbers)
        self._sending[number] = requests, data
        return number

    def is_sent(self, number):
        if number in self._sending and MPI.Request.Testall(self._sending[number][0]):
            del self._sending[number]
        return number not in self._sending

    def _forget_sent(self):
        for number in list(self._sending):
            self.is_sent(number)

    def receive(self, source, tag):
        status = MPI.Status()
        source = MPI.ANY_SOURCE if source is None else source
        message = self._comm.Improbe(source, tag, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([data, MPI.BYTE], status)
        return status.Get_source(), data

    def receive_into(self, source, tag, array):
        view = as_bytes(array)
        return _MpiReceipt(
            [
                self._comm.Irecv([view[start : start + _CHUNK], MPI.BYTE], source, tag)
                for start in range(0, max(view.size, 1), _CHUNK)
            ]
        )

    def discard(self, tag):
        while self.receive(None, tag) is not None:
            pass


class _MpiReceipt(Receipt):
    def __init__(self, requests):
        self._requests = requests

    def is_complete(self):
        return MPI.Request.Testall(self._requests)

    def cancel(self):
        for request in self._requests:
            if request != MPI.REQUEST_NULL:
                request.Cancel()
                request.Wait()


class Tasks:
    """The tasks of an MPI job, and the machines on which they are. The first of each machine leads it.

    Parameters
    ----------
    apart : int
        If it is not 0, so many tasks in a row count as a machine.

    Attributes
    ----------
    links : MpiLinks or None
        For a task that leads a machine.
    here : MpiLinks or None
        Between the tasks of this machine, for the first, which leads it, and the second, its courier.
        None if there is not a courier on each machine.
    couriers : MpiLinks or None
        Between the couriers of all machines, for one of them.
    tasks_here : int
        The number of tasks on this machine.
    cores : set of int
        The cores of all tasks on this machine: mpirun and srun bind each task to some.
    """

    def __init__(self, apart):
        initialize()
        world = MPI.COMM_WORLD
        if apart:
            here = world.Split(world.rank // apart)
        else:
            here = world.Split_type(MPI.COMM_TYPE_SHARED)
        leads, self.tasks_here = here.rank == 0, here.size
        self.cores = set().union(*here.allgather(os.sched_getaffinity(0)))
        leaders = world.Split(0 if leads else MPI.UNDEFINED, world.rank)
        self.links = MpiLinks(leaders) if leads else None
        self.here = self.couriers = None
        if world.allreduce(here.size, MPI.MIN) > 1:
            is_courier = here.rank == 1
            couriers = world.Split(0 if is_courier else MPI.UNDEFINED, world.rank)
            self.here = MpiLinks(here) if leads or is_courier else None
            self.couriers = MpiLinks(couriers) if is_courier else None
        self._end = world.Dup()

    def finish(self, limit=math.inf):
        """Wait until every task calls this method, without using a core; then finalize MPI.

        Return False if they have not after `limit` seconds.
        """
        request, until = self._end.Ibarrier(), time.monotonic() + limit
        while not request.Test():
            if time.monotonic() > until:
                return False
            time.sleep(_NAP)
        MPI.Finalize()
        return True
