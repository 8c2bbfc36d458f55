"""Ranks on one machine: forked processes, shared memory, POSIX semaphores.

Sending commands: the master writes the bytes of a command into the mailbox and posts each worker's
*start* semaphore. A worker writes its reply into its own box and posts its *finish* semaphore.

Inside a command, ranks synchronize at a dissemination barrier: in round k, rank r posts rank
``r + 2**k`` and waits for rank ``r - 2**k``. This takes ``ceil(log2(size))`` rounds [1]_.

Waiting: if there is a core for each rank, a rank first polls the semaphore, as ``waiting`` specifies.
Then it sleeps in the kernel. It wakes a few times per second to check that the other processes are
alive: the master checks the workers' process sentinels, a worker its parent's process id.

.. [1] Hensgen, Finkel, Manber: Two algorithms for barrier synchronization, 1988.
"""

import itertools
import multiprocessing
import multiprocessing.util
import os
import signal
import time

from synkhronos._errors import (
    REMEDY,
    CollectiveAbortedError,
    MissingRankError,
    SynkhronosError,
    WorldBrokenError,
)
from synkhronos.comms.shm import SharedMemoryCommunicator
from synkhronos.host.machine import affinity, cores
from synkhronos.host.signals import ENDING, ignore_signals_for_the_master
from synkhronos.stores.memory import SharedMemory
from synkhronos.stores.shared import SharedMemoryStore
from synkhronos.transports import limits, liveness
from synkhronos.transports.base import Attendant, Transport
from synkhronos.transports.box import Box
from synkhronos.transports.semaphore import Semaphore
from synkhronos.transports.waiting import Patience

_MAILBOX_BYTES = 1 << 20
_SLOT_BYTES = 1 << 16
_CHECK_INTERVAL = 0.2  # seconds between checks that the other processes are alive
# A sleep much longer than requested means that this process was stopped; that time does not count.
_LONGEST_SLEEP = 2 * _CHECK_INTERVAL
_COUNT_CORES = 256  # commands between two counts of the cores
_FINISHED = 1 << 62  # larger than the number of barriers in any command


class LocalTransport(Transport):
    """Forked processes on this machine.

    Parameters
    ----------
    size, master_rank : int
    timeout : float, optional
        Seconds after which a barrier fails; None for no limit as long as every process lives.
    may_poll : bool, optional
        Whether a waiting rank may poll; None to poll if there is a core for each rank.
    store : SharedMemoryStore, optional
        The store of a former transport, whose workers must end before `start`; by default a new one.
    """

    inherits = True

    def __init__(self, size, master_rank=0, timeout=None, may_poll=None, store=None):
        if size > 1:
            limits.check_may_have_children()
        self.size = self.ranks_here = size
        self.rank = self.master_rank = master_rank
        self.timeout = timeout
        try:
            self.store = SharedMemoryStore(SharedMemory(size)) if store is None else store
        except OSError as error:
            raise limits.too_many_files(error) from error
        self._forker = liveness.Forker()
        self._workers = [rank for rank in range(size) if rank != master_rank]
        self._processes = {}
        self._master_pid = self._own_pid = os.getpid()
        self._may_poll_by_choice = may_poll
        self._may_poll = size <= cores() if may_poll is None else may_poll
        self._between, self._inside = Patience(), Patience()  # between commands, and inside a command
        self._resumed = time.monotonic()  # when this rank's last wait ended
        self._make_boxes()
        memory = self.store.memory
        self._starts = [Semaphore(memory) for _ in range(size)]
        self._finishes = [Semaphore(memory) for _ in range(size)]
        rounds = (size - 1).bit_length()
        self._barriers = [[Semaphore(memory) for _ in range(rounds)] for _ in range(size)]
        self._find_partners()
        self._at_exit = None

    def _make_boxes(self):
        memory = self.store.memory
        self._mailbox = Box(memory, _MAILBOX_BYTES)
        self._replies = [Box(memory, _SLOT_BYTES) for _ in range(self.size)]
        # Two boxes per rank, used alternately: a rank that writes for this exchange has passed the
        # barrier of the last one, so every rank has read the boxes of the one before that.
        self._slots = [[Box(memory, _SLOT_BYTES) for _ in range(self.size)] for _ in range(2)]
        self._turn = 0
        self._passed = 0  # barriers inside this command
        self._aborted = self.store.empty((1,), "int64").data  # from which barrier on, from 1
        self._aborted[0] = 0
        self._commands = 0
        self._has_cores = self.store.empty((1,), "int64").data  # whether there is a core for each rank
        self._has_cores[0] = self._may_poll
        # The number of barriers of this command that each rank has reached, for the timeout message.
        self._arrived = self.store.empty((self.size,), "int64").data
        # The number of barriers that each rank had passed at the end of this command; -1 before it.
        self._ended = self.store.empty((self.size,), "int64").data
        self._checked = 0.0  # when `check` last looked at the processes

    def _find_partners(self):
        self._partners = [
            (self._barriers[(self.rank + (1 << k)) % self.size][k], semaphore)
            for k, semaphore in enumerate(self._barriers[self.rank])
        ]

    def communicator(self):
        return SharedMemoryCommunicator(self, self.store)

    def successor(self, size, master_rank):
        return LocalTransport(
            size, master_rank, self.timeout, self._may_poll_by_choice, self.store
        )

    # Starting and ending

    def start(self, serve):
        self._serve = serve
        self._forker.call(self._fork_workers)

    def _fork_workers(self):
        context = multiprocessing.get_context("fork")
        # A child of multiprocessing ends without calling the functions of `atexit`.
        self._at_exit = multiprocessing.util.Finalize(None, self.kill, exitpriority=1)
        for rank in self._workers:
            self._finishes[rank].drain()  # posted in an earlier attempt
            self._arrived[rank] = 0
        # A worker's signals are blocked until it has set their handlers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            for number, rank in enumerate(self._workers):
                self._fork_worker(context, number, rank, mask)
            # From here on, each worker ends with this process.
            for rank in self._workers:
                self._wait(self._finishes[rank], self._between)
        except BaseException:
            self.kill()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _fork_worker(self, context, number, rank, mask, prepare=None):
        process = context.Process(
            target=self._become_worker,
            args=(rank, mask, prepare),
            name=f"synkhronos-{rank}",
            daemon=True,
        )
        self._processes[rank] = process  # first: an interrupt must not leave it behind
        try:
            process.start()
        except OSError as error:
            raise limits.too_many_workers(error, number, len(self._workers)) from error

    def replace(self, rank, prepare):
        self._forker.call(self._fork_replacement, rank, prepare)

    def answer_for(self, rank, payload):
        liveness.end([self._processes.pop(rank)])
        if self._arrived[rank] != _FINISHED:
            self._replies[rank].put(payload)
            self._ended[rank], self._arrived[rank] = 0, _FINISHED
            self._finishes[rank].post()

    def _fork_replacement(self, rank, prepare):
        liveness.end([self._processes.pop(rank)])
        self._starts[rank].drain()
        has_replied = self._arrived[rank] == _FINISHED  # before it died
        is_unread = not self._finishes[rank].try_wait()
        if not has_replied:
            self._arrived[rank] = 0
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            context = multiprocessing.get_context("fork")
            self._fork_worker(context, 0, rank, mask, prepare)
            self._wait(self._finishes[rank], self._between)
            if not has_replied:
                self._starts[rank].post()  # the mailbox has the command until all have replied
            elif is_unread:
                self._finishes[rank].post()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _become_worker(self, rank, mask, prepare):
        liveness.die_with_parent()
        ignore_signals_for_the_master()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.rank = rank
        self._own_pid = os.getpid()
        self._processes = {}
        self.store.memory.use_span(self.distance)  # the master has the first
        self._find_partners()
        self._check_master()
        if prepare is not None:
            prepare()
        self._finishes[rank].post()
        self._serve(self)

    def attend(self, name, serve):
        return self._forker.call(_ForkedAttendant, name, serve, self.store.memory)

    def has_ended(self, rank):
        return self._ended[rank] >= 0

    def close(self, grace):
        deadline = time.monotonic() + grace
        if not self.is_master_process():
            self._processes = {}  # they belong to the process that this one was forked from
        try:
            for process in self._processes.values():
                process.join(max(0, deadline - time.monotonic()))
        finally:
            self.kill()

    def kill(self):
        if self._at_exit is not None:
            self._at_exit.cancel()
        processes, self._processes = self._processes, {}
        liveness.end(processes.values())
        self._forker.end()

    def is_master_process(self):
        return os.getpid() == self._master_pid

    def is_worker_process(self):
        return self.rank != self.master_rank and os.getpid() == self._own_pid

    # Between master and workers

    def post(self, payload):
        self._turn = self._passed = 0  # a rank that failed may have passed fewer barriers
        self.posted = self.in_program = False
        self._arrived[self.rank], self._ended[self.rank] = 0, -1
        self._mailbox.put(payload)
        self.posted = True
        for rank in self._workers:
            self._arrived[rank], self._ended[rank] = 0, -1
            self._starts[rank].post()

    def collect(self):
        if self._may_poll and self._commands % _COUNT_CORES == 0:
            pids = [process.pid for process in self._processes.values()]
            self._has_cores[0] = affinity([0, *pids]) >= self.size
        self._commands += 1
        self._arrived[self.rank], self._ended[self.rank] = _FINISHED, self._passed
        replies = [None] * self.size
        waited = 0.0
        for rank in self._workers:
            waited = self._wait(self._finishes[rank], self._between, waited)
            replies[rank] = self._replies[rank].get()
        self._mailbox.clear()
        if self._aborted[0] or self.in_program:
            self._aborted[0], self.in_program = 0, False
            for semaphore in itertools.chain.from_iterable(self._barriers):
                semaphore.drain()
        return replies

    def receive(self):
        self._turn = self._passed = 0
        self.posted = self.in_program = False
        self._wait(self._starts[self.rank], self._between)
        return self._mailbox.get()

    def reply(self, payload):
        self._replies[self.rank].put(payload)
        self.posted = True
        self._ended[self.rank] = self._passed
        self._arrived[self.rank] = _FINISHED
        self._finishes[self.rank].post()

    # Among all ranks

    def barrier(self):
        waited = 0.0
        self._arrived[self.rank] = self._passed + 1
        for theirs, ours in self._partners:
            theirs.post()
            waited = self._wait(ours, self._inside, waited)
            # A rank that failed later has passed this barrier; then all ranks pass it.
            if 0 < self._aborted[0] <= self._passed + 1:
                raise CollectiveAbortedError(
                    f"rank {self.rank} left a collective: another rank failed in this command"
                )
        self._passed += 1

    def exchange(self, item):
        self._turn = 1 - self._turn
        slots = self._slots[self._turn]
        slots[self.rank].put(item)
        self.barrier()
        return [slot.get() for slot in slots]

    def abort(self):
        self._aborted[0] = self._passed + 1
        for rank, semaphores in enumerate(self._barriers):
            if rank != self.rank:
                for semaphore in semaphores:
                    semaphore.post()

    def check(self):
        if self._aborted[0]:
            raise CollectiveAbortedError(
                f"rank {self.rank} left the program: another rank failed in it"
            )
        now = time.monotonic()
        if now - self._checked > _CHECK_INTERVAL:
            self._checked = now
            self._check_workers() if self.rank == self.master_rank else self._check_master()

    # Waiting

    def _wait(self, semaphore, patience, waited=0.0):
        """Wait for a post; return the total seconds of waiting at this barrier, `waited` included."""
        if not semaphore.try_wait():
            return waited
        began = checked = time.monotonic()
        worked = began - self._resumed
        if self._has_cores[0] and patience.poll(semaphore.try_wait, began, worked):
            self._resumed = now = time.monotonic()
            return waited + min(now - checked, _LONGEST_SLEEP)
        while not semaphore.wait(_CHECK_INTERVAL):
            # Signal handlers of the script may end a wait early.
            now = time.monotonic()
            if now - checked > _CHECK_INTERVAL / 2:
                waited += min(now - checked, _LONGEST_SLEEP)
                checked = now
                self._check_others(waited, patience is self._inside)
        self._resumed = now = time.monotonic()
        patience.learn(worked, now - began)
        return waited + min(now - checked, _LONGEST_SLEEP)

    def _check_others(self, waited, inside):
        if inside:
            self._check_missing()
        limit = self.timeout
        if self.rank != self.master_rank:
            self._check_master()
            if self.in_program and inside and limit is not None and waited > limit:
                raise SynkhronosError(
                    f"rank {self.rank} waited longer than fork(timeout={limit}) seconds inside a "
                    f"program, for {self._describe_late()}"
                )
            return
        self._check_workers()
        self.while_waiting()
        if self.in_program and not inside and not self._aborted[0]:
            return  # a program may take any time
        if limit is not None and waited > limit:
            late = self._describe_late()
            self.kill()
            raise WorldBrokenError(
                f"a barrier lasted longer than fork(timeout={self.timeout}) seconds, for {late}; "
                f"every worker was ended; {REMEDY}"
            )

    def _check_missing(self):
        """Raise if a rank has ended the command and will never reach this barrier."""
        missing = [rank for rank in range(self.size) if 0 <= self._ended[rank] <= self._passed]
        if missing and not self._aborted[0]:
            raise MissingRankError(
                f"rank {self.rank} waits in a collective for {_listed(missing)}, which ended the "
                f"program without it; let every rank call the same collectives in the same order"
            )

    def _describe_late(self):
        """Name the ranks that are stopped, else the ranks that have reached the fewest barriers."""
        stopped = liveness.find_stopped(self._processes)
        if stopped:
            return ", ".join(f"rank {rank} (stopped, as by SIGSTOP)" for rank in stopped)
        others = [rank for rank in range(self.size) if rank != self.rank]
        first = min(self._arrived[rank] for rank in others)
        behind = [rank for rank in others if self._arrived[rank] == first]
        doing = "computing" if first == 0 else f"after barrier {first} of the command"
        return ", ".join(f"rank {rank} (running, {doing})" for rank in behind)

    def _check_master(self):
        if os.getppid() != self._master_pid:
            os._exit(1)

    def _check_workers(self):
        """If a worker is dead, end all workers and raise `WorldBrokenError`."""
        if not self._processes:
            raise WorldBrokenError(f"the workers were ended from another thread; {REMEDY}")
        dead = liveness.find_dead(self._processes)
        if not dead:
            return
        if self.in_program and self.on_death is not None:
            return self.on_death(dead)
        causes = ", ".join(f"rank {rank} ({cause})" for rank, cause in dead.items())
        self.kill()
        raise WorldBrokenError(f"a worker died: {causes}; the others were ended; {REMEDY}")


class _ForkedAttendant(Attendant):
    """A process that is not a rank, and allocates from a span of its own."""

    def __init__(self, name, serve, memory):
        def target():
            liveness.die_with_parent()
            ignore_signals_for_the_master()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            memory.use_span(memory.ranks + 1)
            serve()

        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=target, name=f"synkhronos-{name}", daemon=True)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def is_alive(self):
        return self._process.is_alive()

    def end(self, grace):
        self._process.join(grace)
        liveness.end([self._process])


def _listed(ranks):
    return "rank" + "s" * (len(ranks) > 1) + " " + ", ".join(map(str, ranks))


def _disown_workers():
    """In a process that the script forks: otherwise multiprocessing ends the workers when it exits."""
    children = multiprocessing.process._children
    children -= {child for child in children if child.name.startswith("synkhronos-")}


os.register_at_fork(after_in_child=_disown_workers)
