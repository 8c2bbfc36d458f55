"""The machines of an MPI job: how their leaders find each other, and the loop of the leaders of workers.

The script runs in the first task of the job. On every other machine, one task leads the ranks of the
machine: it waits until the script calls ``fork()``, forks the ranks, and is one of them, until the
world is closed. Then it waits for the next ``fork()``, or for the end of the script.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import socket
import sys
import traceback
from typing import Any, NamedTuple, Sequence

import numpy as np

from synkhronos._errors import SynkhronosError, WorldBrokenError, text_of
from synkhronos._version import __version__
from synkhronos.arithmetic.machines import fewer_on_machines, nearest_master, ranks_of_machines
from synkhronos.engines.names import package
from synkhronos.host import job
from synkhronos.host.compiler import TITLE
from synkhronos.host.log import logger
from synkhronos.host.machine import cores, use_cores
from synkhronos.machines import progress_process as progress_processes
from synkhronos.machines.job import reports
from synkhronos.machines.leaders import BROKEN, CONTROL, Leaders, LostError
from synkhronos.machines.progress_process import TaskProgressProcess
from synkhronos.machines.transport import MachinesTransport
from synkhronos.transports.tree import make_local
from synkhronos.world.devices import Fact, check_versions, digest_of, get_n_gpu, make_engine, place
from synkhronos.world.threads import ThreadLimits, use_more_cores
from synkhronos.world.world import Options, World, enter_world

_CLOSING = 2.0  # seconds for a worker to end by itself
_LEAVING = 2.5  # seconds for the other machines to end at the end of the script
# Parts of the messages of errors that a dead process has caused
_OF_LOSSES = ("(killed by SIG", " left the job")
# Orders between commands, in addition to the transport's own messages
_START, _TOGETHER, _EXIT = "start", "together", "exit"


class _WorldOfJob(NamedTuple):
    """The facts that the master tells the other leaders of a world.

    Attributes
    ----------
    by_machine : list of list of str
        The device of each rank.
    master_rank, timeout, profile_workers
        As given to ``fork()``.
    """

    by_machine: list[list[str]]
    master_rank: int
    timeout: float | None
    profile_workers: bool

    @property
    def ranges(self) -> list[range]:
        """The ranks of each machine."""
        return ranks_of_machines([len(item) for item in self.by_machine], self.master_rank)


class Machines:
    """The machines of this job, as seen by the leader of a machine.

    Attributes
    ----------
    leaders : Leaders or None
        None for a task that leads no machine.
    facts : list of Fact
        The facts of each machine.
    """

    def __init__(self) -> None:
        try:
            from synkhronos.machines.mpi import Tasks
        except ImportError as error:
            raise SynkhronosError(
                f"this process is a task of an MPI job, which needs mpi4py: {error}; install it on "
                f"every machine: pip install 'synkhronos[mpi]'"
            ) from error
        self._tasks = Tasks(job.tasks_apart())
        self._use_all_cores()
        # A task that leads no machine does not use it.
        self.leaders: Leaders = (
            None if self._tasks.links is None else Leaders(self._tasks.links)  # type: ignore[assignment]
        )
        if self.leaders is not None:
            own = pickle.dumps(self._fact())
            self.facts: Sequence[Fact] = [pickle.loads(item) for item in self.leaders.exchange(own)]
            check_versions(self.facts)
        self._world: Any = None  # the last `_WorldOfJob`

    def _use_all_cores(self) -> None:
        """Also use the cores of this machine's other tasks, which only wait."""
        if self._tasks.tasks_here > 1 and self._tasks.links is not None:
            before = cores()
            use_cores(self._tasks.cores)
            if cores() > before:
                use_more_cores(before)

    def _fact(self) -> Fact:
        tasks = max(1, self._tasks.tasks_here - job.spare_tasks())
        return Fact(
            socket.gethostname(),
            (__version__, sys.version.split()[0], np.__version__, f"{TITLE} {package.__version__}"),
            digest_of(),
            job.ranks() or (tasks if tasks > 1 else None),
            cores(),
            get_n_gpu(),
            job.devices(),
        )

    def place(
        self, n_parallel: int | None, use_gpu: bool | None, devices: Sequence[str] | None
    ) -> list[list[str]]:
        """Return the devices of each machine, one for each rank, from the arguments of ``fork()``."""
        self._go_on_with_the_living()
        return place(self.facts, n_parallel, use_gpu, devices)

    def start(
        self,
        by_machine: list[list[str]],
        master_rank: int,
        timeout: float | None,
        profile_workers: bool,
    ) -> MachinesTransport:
        """Let the leaders of the other machines start their ranks; return the master's transport."""
        self._world = _WorldOfJob(by_machine, master_rank, timeout, profile_workers)
        self._tell(_START, self._world)
        return self._transport(self._world)

    def _tell(self, what: str, *details: Any) -> None:
        self.leaders.begin_first(self.leaders.number + 1)
        for machine in range(1, self.leaders.size):
            self.leaders.send_order(machine, CONTROL, what, *details)

    def _transport(
        self, world: _WorldOfJob, former: MachinesTransport | None = None
    ) -> MachinesTransport:
        ranges = world.ranges
        own = ranges[self.leaders.rank]
        first = own.index(world.master_rank) if self.leaders.rank == 0 else 0
        store: Any = None if former is None else former.store
        local_store = None if store is None else store.local
        local = make_local(len(own), first, world.timeout, store=local_store, labels=own)
        progress_process = None if self._tasks.local is None else TaskProgressProcess(self._tasks.local)
        names = [
            f"machine {fact.host} (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"
            for fact, ranks in zip(self.facts, ranges)
        ]
        self.leaders.links.names = names
        if self._tasks.local is not None:
            progress_processes.tell(self._tasks.local, names)
        return MachinesTransport(
            local, self.leaders, ranges, world.master_rank, world.timeout, progress_process, self, store
        )

    # After the end of a world

    def possible_sizes(self) -> range:
        """Return the numbers of ranks with which the world can continue; see `Transport`."""
        self._go_on_with_the_living()
        return range(len(self._world.by_machine), sum(map(len, self._world.by_machine)) + 1)

    def successor(self, former: MachinesTransport, size: int, master_rank: int) -> MachinesTransport:
        """Let the leaders of the other machines start new ranks; return the master's transport.

        The master's rank is the largest one up to `master_rank` that its machine can have.
        """
        by_machine = fewer_on_machines(self._world.by_machine, size)
        master_rank = nearest_master([len(item) for item in by_machine], master_rank)
        world = self._world._replace(by_machine=by_machine, master_rank=master_rank)
        self._tell(_START, world)
        return self._transport(world, former)

    # The other machines

    def serve(self) -> None:
        """Lead this machine's ranks, or run as its progress process, until the job ends."""
        try:
            if self._tasks.progress_processes is not None:
                progress_processes.serve(
                    self._tasks.local, self._tasks.progress_processes, self._tasks.neighbours
                )
            if self.leaders is not None:
                self._serve_worlds()
            self._tasks.finish()
        except LostError:
            if self.leaders is not None:
                raise  # at the end
            self._tasks.wait_for_leader()
            self._tasks.meet_again()
            self.serve()

    def _serve_worlds(self) -> None:
        while True:
            try:
                order = self.leaders.receive_order()
            except LostError:
                if 0 in self.leaders.links.lost():
                    raise
                self.leaders.links.acknowledge()
                continue
            what, *details = order.content()
            if what == _EXIT:
                self._end_progress_process()
                break
            if what == _TOGETHER:
                self._meet_again()
            if what == _START:  # other orders belong to a world that has ended here
                self.leaders.begin_first(order.number)
                self._lead(*details)

    def _end_progress_process(self) -> None:
        if self._tasks.local is not None:
            progress_processes.tell(self._tasks.local, None)

    # After a machine was lost

    def has_lost_script(self) -> bool:
        """Whether the task that runs the script is known to have died."""
        return self._tasks.has_script_died()

    def _go_on_with_the_living(self) -> None:
        """Master: after tasks have died, remove them and their machines from the job."""
        if not self._tasks.have_died():
            return
        lost = self.leaders.links.lost()
        self.leaders.links.acknowledge()
        for machine in range(1, self.leaders.size):
            if machine not in lost:
                self.leaders.send_order(machine, CONTROL, _TOGETHER)
        self._meet_again()

    def _meet_again(self) -> None:
        former = self.leaders.rank
        self._end_progress_process()
        self._tasks.call_together()
        self._tasks.meet_again()
        self.leaders = Leaders(self._tasks.links)
        own = pickle.dumps((former, self._fact()))
        formers, self.facts = zip(*[pickle.loads(payload) for payload in self.leaders.exchange(own)])
        if self._world is not None:
            by_machine = [self._world.by_machine[machine] for machine in formers]
            self._world = self._world._replace(by_machine=by_machine)

    def _lead(self, order: _WorldOfJob) -> None:
        try:
            transport = self._transport(order)
            engine = make_engine(order.by_machine[self.leaders.rank])
            world = World(transport, engine, ThreadLimits(), Options(order.profile_workers))
            enter_world(world)
            try:
                world.start()
                world.work(transport)
            except BaseException:
                transport.local.kill()  # they may compute for a long time
                raise
            finally:
                transport.close(_CLOSING)
                world.free()
        except BaseException as error:
            host = self.facts[self.leaders.rank].host
            self.leaders.notify(BROKEN, f"on {host}: {text_of(error)}", [0])
            if not isinstance(error, Exception):
                raise
        finally:
            self.leaders.end_world()

    def finish(self) -> None:
        """Let the other tasks end, and end MPI."""
        self._go_on_with_the_living()
        self._tell(_EXIT)
        self._end_progress_process()
        if not self._tasks.finish(_LEAVING):
            from synkhronos.machines.mpi import abort

            # The leader of a machine cannot be interrupted while it computes.
            logger.error("another machine still computes for a world that was broken; the job is ended")
            reports.report(reports.FAILED)
            abort()


@functools.lru_cache(maxsize=None)
def machines_of_job() -> Machines | None:
    """Return the machines of this process's MPI job; None if it is not a task of a job."""
    return None if job.own_task() is None else Machines()


def end() -> None:
    """End the job at the end of the script."""
    error = getattr(sys, "last_value", None)  # that has ended the script
    if isinstance(error, WorldBrokenError) and any(part in str(error) for part in _OF_LOSSES):
        reports.report(reports.LOST, str(error).partition(";")[0])
    try:
        machines = machines_of_job()
    except BaseException:
        from synkhronos.machines.mpi import abort

        reports.report(reports.FAILED)
        abort()  # the tasks have not found each other, so they cannot be told
        raise
    if machines is not None:
        machines.finish()


def serve() -> None:
    """Run a task of a job that does not run the script."""
    machines = machines_of_job()
    try:
        if machines is not None:
            machines.serve()
    except BaseException as error:
        if not isinstance(error, LostError):
            reports.report(reports.FAILED)
        if not job.survives_deaths():
            raise
        if not isinstance(error, LostError):  # which other ranks report
            traceback.print_exc()
        elif machines is not None and machines.has_lost_script():
            from synkhronos.machines.mpi import abort

            abort()  # else mpirun waits for all tasks, and returns 0
        # The other tasks are notified if a signal ends this task, but would wait for it if it exited.
        os.kill(os.getpid(), signal.SIGKILL)
