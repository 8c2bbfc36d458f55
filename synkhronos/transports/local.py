"""Ranks on one machine: forked processes, shared memory, POSIX semaphores.

Sending commands: the master writes the bytes of a command into the mailbox and posts each worker's
*start* semaphore. A worker writes its reply into its own box and posts its *finish* semaphore. Many
ranks post along a tree instead, see ``tree``.

Inside a command, ranks synchronize at a dissemination barrier: in round k, rank r posts rank
``r + 2**k`` and waits for rank ``r - 2**k``. This takes ``ceil(log2(size))`` rounds [1]_.

Waiting: if there is a core for each rank, a rank first polls the semaphore, as ``waiting`` specifies.
Then it sleeps in the kernel. It wakes a few times per second to check that the other processes are
alive: the master checks the workers' process sentinels, a worker its parent's process id.

.. [1] Hensgen, Finkel, Manber: Two algorithms for barrier synchronization, 1988.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from typing import Callable, Mapping, NoReturn, Sequence

from synkhronos._errors import (
    REMEDY,
    CollectiveAbortedError,
    MissingRankError,
    SynkhronosError,
    WorldBrokenError,
)
from synkhronos.comms.base import Communicator, Group
from synkhronos.comms.shm import SharedMemoryCommunicator
from synkhronos.host.descriptors import OpenFile, descriptors, give_up
from synkhronos.host.machine import affinity, cores, leave_core_of
from synkhronos.host.status import PROCESS, REACHED, REACHED_IN, StatusPage
from synkhronos.stores.base import SharedMemoryStore
from synkhronos.stores.handle import Needs
from synkhronos.stores.memory import SharedMemory
from synkhronos.transports import limits
from synkhronos.transports.base import ServiceProcess, Transport, do_nothing
from synkhronos.transports.children import Children
from synkhronos.transports.mailbox import Mailbox
from synkhronos.transports.waiting import BarrierProgress, Semaphore, SpinPolicy

CHECK_INTERVAL = 0.2  # seconds between checks that the other processes are alive
_START = 60.0  # seconds for a worker to start, if there is no other limit
_MAILBOX_BYTES = 1 << 20
_SLOT_BYTES = 1 << 16
# A sleep much longer than requested means that this process was stopped; that time does not count.
_LONGEST_SLEEP = 2 * CHECK_INTERVAL
_COUNT_CORES = 256  # commands between two counts of the cores


class LocalTransport(Transport):
    """Forked processes on this machine.

    Parameters
    ----------
    size, master_rank : int
        The number of ranks, and the rank of this process.
    timeout : float, optional
        Seconds after which a barrier fails; None for no limit as long as every process lives.
    may_poll : bool, optional
        Whether a waiting rank may poll; None to poll if there is a core for each rank.
    store : SharedMemoryStore, optional
        The store of a former transport, whose workers must end before `start`; by default a new store.
    labels : sequence of int, optional
        The number of each rank in messages to users; by default the rank itself.
    make : callable, optional
        Makes successors, from the same parameters; by default this class.
    """

    store: SharedMemoryStore
    status: StatusPage
    progress: memoryview
    inherits = True
    can_replace = can_stay = True
    _checked = 0.0  # when `check` last looked at the processes
    _cause = f"the workers were ended from another thread; {REMEDY}"  # why they were ended

    def __init__(
        self,
        size: int,
        master_rank: int = 0,
        timeout: float | None = None,
        may_poll: bool | None = None,
        store: SharedMemoryStore | None = None,
        labels: Sequence[int] | None = None,
        make: Callable[..., LocalTransport] | None = None,
    ) -> None:
        if size > 1:
            limits.check_may_have_children()
        self.size = self.ranks_here = size
        self.labels = range(size) if labels is None else labels
        self.rank = self.master_rank = master_rank
        self.timeout = timeout
        try:
            self.store = SharedMemoryStore(SharedMemory(size)) if store is None else store
            self.status = StatusPage(size, master_rank, self.labels, _MAILBOX_BYTES)
        except OSError as error:
            raise limits.too_many_files(error) from error
        self._children = Children()
        self._workers = [rank for rank in range(size) if rank != master_rank]
        self._master_pid = self._own_pid = os.getpid()
        self._may_poll_by_choice, self._make = may_poll, make or LocalTransport
        self._may_poll = size <= cores() if may_poll is None else may_poll
        self._inside = SpinPolicy()  # waits inside a command
        self._between = SpinPolicy(self._inside, self._leave_core)
        self._make_boxes()
        memory = self.store.memory
        self._starts = [Semaphore(memory) for _ in range(size)]
        self._finishes = [Semaphore(memory) for _ in range(size)]
        rounds = (size - 1).bit_length()
        self._barriers = [[Semaphore(memory) for _ in range(rounds)] for _ in range(size)]
        self._read = 0  # of the workers' replies to this command
        self._awaited = -1  # the rank whose reply the master waits for
        self._find_partners()

    def _make_boxes(self) -> None:
        memory, status = self.store.memory, self.status
        self._mailbox = Mailbox(memory, _MAILBOX_BYTES, (status.mapping, status.box))
        self._replies = [Mailbox(memory, _SLOT_BYTES) for _ in range(self.size)]
        # Two boxes per rank, used alternately: a rank that writes for this exchange has passed the
        # barrier of the last exchange, so every rank has read the boxes of the exchange before that.
        self._slots = [[Mailbox(memory, _SLOT_BYTES) for _ in range(self.size)] for _ in range(2)]
        self._turn = 0
        self._passed = 0  # barriers inside this command
        self._progress = BarrierProgress(status)
        self._commands = 0
        self._has_cores = self.store.empty((1,), "int64").data  # whether there is a core for each rank
        self._has_cores[0] = self._may_poll

    def _find_partners(self) -> None:
        self.progress = self.status.line(self.rank)
        self.progress[PROCESS] = os.getpid()
        self._partners = [
            (self._barriers[(self.rank + (1 << k)) % self.size][k], semaphore)
            for k, semaphore in enumerate(self._barriers[self.rank])
        ]
        self._post_below = [self._starts[rank].post for rank in self._workers]  # by the master
        self._post_reply: Callable[[], object] = self._finishes[self.rank].post

    def communicator(self, group: Group | None = None) -> Communicator:
        return SharedMemoryCommunicator(self if group is None else group, self.store)

    def possible_sizes(self) -> range:
        return range(1, self.store.ranks + 1)

    def successor(self, size: int, master_rank: int) -> LocalTransport:
        made = self._make(size, master_rank, self.timeout, self._may_poll_by_choice, self.store)
        self.release()
        return made

    # Starting and ending

    def start(
        self,
        serve: Callable[[Transport], None],
        while_waiting: Callable[[], None] = do_nothing,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._serve, self._while_waiting, self._pass_fds = serve, while_waiting, pass_fds
        try:
            self._children.relay_log()
        except OSError as error:
            raise limits.too_many_files(error) from error
        self._children.run(self._fork_workers)

    def _fork_workers(self) -> None:
        for rank in self._workers:
            self._finishes[rank].drain()  # posted in an earlier attempt
            self._progress.forget(rank)
        try:
            for number, rank in enumerate(self._workers):
                self._fork_worker(rank, number)
            # From here on, each worker ends with this process.
            for rank in self._workers:
                if not self._has_started(rank):
                    self._check_workers()
        except BaseException:
            self.kill()
            raise

    def _fork_worker(self, rank: int, number: int, prepare: Callable[[], None] | None = None) -> None:
        try:
            inherited = descriptors()
            self._children.fork_worker(rank, lambda: self._become_worker(rank, inherited, prepare))
        except OSError as error:
            raise limits.too_many_workers(error, number, len(self._workers)) from error

    def _become_worker(
        self,
        rank: int,
        inherited: Mapping[int, OpenFile | None],
        prepare: Callable[[], None] | None,
    ) -> None:
        give_up(inherited, self._pass_fds)
        self.rank = rank
        self._own_pid, self.is_copy = os.getpid(), False
        self._between = SpinPolicy(self._inside, self._core_leaver())
        self.store.memory.use_span(self.distance)  # the master has the first
        self._find_partners()
        self._check_master()
        if prepare is not None:
            prepare()
        self._finishes[rank].post()
        self._serve(self)

    def _core_leaver(self) -> Callable[[], bool]:
        """Return what a worker calls to leave the core of the rank that has started it."""
        return functools.partial(leave_core_of, self._master_pid)

    def replace(self, rank: int, prepare: Callable[[bool], None]) -> None:
        self._children.run(self._fork_replacement, rank, prepare)

    def _fork_replacement(self, rank: int, prepare: Callable[[bool], None]) -> None:
        self._children.discard(rank)
        self._starts[rank].drain()
        self._finishes[rank].drain()
        has_replied = self._progress.has_finished(rank)  # before it died
        if not has_replied:
            self._progress.forget(rank)
        self._fork_worker(rank, 0, functools.partial(prepare, not has_replied))
        if not self._has_started(rank):
            return  # it has died as well; the next check finds that
        if not has_replied:
            self._starts[rank].post()  # the mailbox has the command until all have replied
        else:
            self._finish_again(rank)

    def _finish_again(self, rank: int) -> None:
        """Post for a dead worker that may not have had the time to post that it has replied."""
        if self._workers.index(rank) >= self._read:
            self._finishes[rank].post()

    def _has_started(self, rank: int) -> bool:
        """Wait until a new worker is ready; return False if it has died."""
        limit = _START if self.timeout is None else self.timeout
        began = time.monotonic()
        while not self._finishes[rank].wait(CHECK_INTERVAL):
            if rank in self._children.find_dead():
                return False
            self._while_waiting()
            if time.monotonic() - began > limit:
                self._end_workers(limits.not_started(self.labels[rank], limit))
        return True

    def answer_for(self, rank: int, payload: bytes) -> None:
        self._children.discard(rank)
        if not self._progress.has_finished(rank):
            self._replies[rank].put(payload)
            self._progress.finish(rank, 0)
        self._finish_again(rank)

    def attend(self, name: str, serve: Callable[[], None]) -> ServiceProcess:
        def become() -> None:
            # The span before it belongs to the named memory.
            self.store.memory.use_span(self.store.ranks + 1)
            serve()

        return self._children.run(self._children.fork_service_process, name, become)

    def close(self, grace: float) -> None:
        # In a process that was forked from the master, the workers belong to the master.
        self._children.close(grace) if self.is_master_process() else self._children.workers.clear()

    def release(self) -> None:
        # Nothing reads them afterwards.
        self._mailbox = self._replies = self._slots = None  # type: ignore[assignment]
        self._progress = self._has_cores = None  # type: ignore[assignment]
        self.progress = self.status = None  # type: ignore[assignment]
        self._starts = self._finishes = None  # type: ignore[assignment]
        self._post_below = self._post_reply = None  # type: ignore[assignment]
        self._barriers = self._partners = None  # type: ignore[assignment]

    def kill(self) -> None:
        self._children.workers.clear() if self.is_copy else self._children.kill()

    def _leave_core(self) -> bool:
        worker = self._children.workers.get(self._awaited)
        return worker is not None and leave_core_of(worker.pid)  # type: ignore[arg-type]  # it was started

    def is_master_process(self) -> bool:
        return os.getpid() == self._master_pid

    def is_worker_process(self) -> bool:
        return self.rank != self.master_rank and os.getpid() == self._own_pid

    # Between master and workers

    def post(self, payload: bytes, needs: Needs | None = None) -> None:
        if self.is_copy:
            self.end_copy()
        # A rank that failed may have passed fewer barriers.
        self._turn = self._passed = self._read = 0
        self.posted = False
        if self.in_program:
            self._end_program()
        self._mailbox.put(payload)  # first: a worker of a tree may find the number before a post
        self._progress.command[0] += 1
        self.posted = True
        for post in self._post_below:
            post()

    def collect(self) -> list[bytes | None]:
        if self.is_copy:
            self.end_copy()
        if self._may_poll and self._commands % _COUNT_CORES == 0:
            self._has_cores[0] = affinity([0, *self._children.pids()]) >= self.size
        self._commands += 1
        self._progress.finish(self.rank, self._passed)
        replies = self._wait_for_replies()
        log = self._children.log
        if log is not None and log.has_records[0]:
            log.emit()
        self._mailbox.long = None  # it has been read
        if self._progress.aborted[0] or self.in_program:
            self._reset()
        return replies

    def _wait_for_replies(self) -> list[bytes | None]:
        """Return the reply of each worker, by rank."""
        replies: list[bytes | None] = [None] * self.size
        waited = 0.0
        for rank in self._workers:
            self._awaited = rank
            waited = self._wait(self._finishes[rank], self._between, waited)
            self._read += 1
            replies[rank] = self._replies[rank].get()
        return replies

    def _reset(self) -> None:
        """Undo what a failed command or a program may have left."""
        self._progress.aborted[0] = 0
        self._end_program()
        for semaphore in itertools.chain.from_iterable(self._barriers):
            semaphore.drain()

    def receive(self, when_idle: Callable[[], None] = do_nothing) -> bytes:
        if self.is_copy:
            self.end_copy()
        self._turn = self._passed = 0
        self.posted = False
        if self.in_program:
            self._end_program()
        self._wait_for_start(when_idle)
        return self._mailbox.get()

    def _wait_for_start(self, when_idle: Callable[[], None]) -> None:
        self._wait(self._starts[self.rank], self._between, when_idle=when_idle)

    def reply(self, payload: bytes) -> None:
        if self.is_copy:
            self.end_copy()
        self._replies[self.rank].put(payload)
        self.posted = True
        self._progress.finish(self.rank, self._passed)
        self._post_reply()

    # Among all ranks

    def barrier(self) -> None:
        if self.is_copy:
            self.end_copy()
        waited, barrier, progress = 0.0, self._passed + 1, self._progress
        self.progress[REACHED] = barrier
        self.progress[REACHED_IN] = progress.command[0]
        for theirs, ours in self._partners:
            theirs.post()
            waited = self._wait(ours, self._inside, waited)
            # A rank that failed later has passed this barrier; then all ranks pass it.
            if 0 < progress.aborted[0] <= barrier:
                raise CollectiveAbortedError(
                    f"rank {self.labels[self.rank]} left a collective: another rank failed in this "
                    f"command"
                )
        self._passed = barrier

    def exchange(self, item: bytes) -> list[bytes]:
        if self.is_copy:
            self.end_copy()
        self._turn = 1 - self._turn
        slots, received = self._slots[self._turn], []
        own = slots[self.rank]
        own.put(item)
        self.barrier()
        for slot in slots:
            received.append(item if slot is own else slot.get())
        return received

    def abort(self) -> None:
        self.end_copy()
        self._progress.aborted[0] = self._passed + 1
        for rank, semaphores in enumerate(self._barriers):
            if rank != self.rank:
                for semaphore in semaphores:
                    semaphore.post()

    # Waiting

    def _wait(
        self,
        semaphore: Semaphore,
        patience: SpinPolicy,
        waited: float = 0.0,
        when_idle: Callable[[], None] | None = None,
    ) -> float:
        """Wait for a post; return the total seconds of waiting at this barrier, `waited` included."""
        if not semaphore.try_wait():
            return waited
        began = checked = time.monotonic()
        worked = began - patience.resumed
        if self._has_cores[0] and patience.poll(semaphore.try_wait, began, worked, when_idle):
            return waited + patience.resumed - began
        while not semaphore.wait(CHECK_INTERVAL):
            # Signal handlers of the script may end a wait early.
            now = time.monotonic()
            if now - checked > CHECK_INTERVAL / 2:
                waited += min(now - checked, _LONGEST_SLEEP)
                checked = now
                waited = self._check_others(waited, patience is self._inside)
        now = patience.resume()
        patience.learn(worked, now - began, self._has_cores[0])
        return waited + min(now - checked, _LONGEST_SLEEP)

    # Whether the other ranks are alive

    def check(self) -> None:
        if self.is_copy:
            raise SynkhronosError(
                f"this process was forked from rank {self.labels[self.rank]}, and only that one may use "
                f"the other ranks; end this one by os._exit()"
            )
        if self._progress.aborted[0]:
            raise CollectiveAbortedError(
                f"rank {self.labels[self.rank]} left the program: another rank failed in it"
            )
        now = time.monotonic()
        if now - self._checked > CHECK_INTERVAL:
            self._checked = now
            if self.rank != self.master_rank:
                self._check_master()
            elif self.size > 1:
                self._check_workers()

    def check_waiting(self, waited: float) -> None:
        self._check_others(waited, False)

    def _check_others(self, waited: float, inside: bool) -> float:
        """Raise if waiting is useless or too long; return the seconds of waiting that count."""
        if inside:
            self._check_missing()
        if self.rank != self.master_rank:
            self._check_master()
            if inside and self.in_program and self._is_late(waited):
                raise SynkhronosError(
                    f"rank {self.labels[self.rank]} waited longer than fork(timeout={self.timeout}) "
                    f"seconds inside a program, for {self._describe_late()}"
                )
            return waited
        self._check_workers()
        self._while_waiting()
        if self.in_program and not inside and not self._progress.aborted[0]:
            if self.timeout is None or not self._children.find_stopped():
                return 0.0  # a program may take any time
        if self._is_late(waited):
            self._end_workers(
                f"a barrier lasted longer than fork(timeout={self.timeout}) seconds, for "
                f"{self._describe_late()}; every worker was ended; {REMEDY}"
            )
        return waited

    def _is_late(self, waited: float) -> bool:
        return self.timeout is not None and waited > self.timeout

    def _end_workers(self, cause: str) -> NoReturn:
        # A program on the leader of a machine may catch the error, or reply with it. The next error must
        # name the cause, too.
        self._cause = cause
        self.kill()
        raise WorldBrokenError(cause)

    def _check_missing(self) -> None:
        """Raise if a rank has ended the command and will never reach this barrier."""
        missing = self._progress.missing(self._passed)
        if missing and not self._progress.aborted[0]:
            listed = (
                "rank"
                + "s" * (len(missing) > 1)
                + " "
                + ", ".join(str(self.labels[rank]) for rank in missing)
            )
            raise MissingRankError(
                f"rank {self.labels[self.rank]} waits in a collective for {listed}, which ended the "
                f"program without it; let every rank call the same collectives in the same order"
            )

    def _describe_late(self) -> str:
        stopped = self._children.find_stopped()
        if stopped:
            return ", ".join(f"rank {self.labels[rank]} (stopped, as by SIGSTOP)" for rank in stopped)
        return self._progress.describe_late(self._not_late(), self.labels)

    def _not_late(self) -> set[int]:
        """Return the ranks that need not be named if a wait is too long."""
        return {self.rank}

    def _check_master(self) -> None:
        if os.getppid() != self._master_pid:
            os._exit(1)

    def _check_workers(self) -> None:
        """If a worker is dead, end all workers and raise `WorldBrokenError`."""
        self._children.emit_log()
        if self._children.are_ended:
            raise WorldBrokenError(self._cause)
        dead = self._children.find_dead()
        if not dead:
            return
        if self.in_program and self._on_death is not None:
            return self._on_death(dead)
        causes = ", ".join(f"rank {self.labels[rank]} ({cause})" for rank, cause in dead.items())
        self._end_workers(f"a worker died: {causes}; the others were ended; {REMEDY}")
