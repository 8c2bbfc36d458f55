"""Ranks on one machine: forked processes, shared memory, POSIX semaphores.

How a command travels. The master writes its bytes into the mailbox and posts each worker's *start*
semaphore; a worker writes its reply into a slot of its own and posts its *finish* semaphore. Bytes
that are too long for mailbox or slot get a block of shared memory.

Inside a command ranks meet at a dissemination barrier: in round k rank r posts rank ``r + 2**k`` and
waits for rank ``r - 2**k``, which takes ``ceil(log2(size))`` rounds [1]_.

How to wait. A waiter first looks at the semaphore in a loop for a moment, if there is a core for each
rank (a core that sleeps takes ten times longer to answer), and longer the more often that helps. The
master counts the cores now and then: ranks that have since been moved to fewer would keep each other
from them. Then it sleeps in the kernel, but wakes a few times a second to see that the others live: the
master by the workers' process sentinels, a worker by its parent's process id.

The semaphores' names exist for as long as it takes to remove them again.

.. [1] Hensgen, Finkel, Manber: Two algorithms for barrier synchronization, 1988.
"""

import ctypes
import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import sys
import threading
import time

import posix_ipc

from synkhronos._errors import CollectiveAbortedError, WorldBrokenError
from synkhronos._interrupts import ENDING, leave_to_master
from synkhronos._machine import affinity
from synkhronos.transports import limits
from synkhronos.transports.base import Transport
from synkhronos.transports.semaphores import drain, make_semaphores
from synkhronos.transports.shm import SharedMemory

_MAILBOX_BYTES = 1 << 20
_SLOT_BYTES = 1 << 16
_LOOK = 0.2  # seconds between two looks at whether the others live
_DYING = 1.0  # seconds to wait for the exit code of a process that is ending
_FEWEST_SPINS, _MOST_SPINS = 64, 4096  # looks at a semaphore, each some 50 nanoseconds
_LONGEST_SPIN = 2e-4  # seconds, about that of the most
_COUNT_CORES = 256  # commands from one count to the next
_PR_SET_PDEATHSIG = 1


class LocalTransport(Transport):
    """Forked processes on this machine.

    Parameters
    ----------
    size, master_rank : int
    timeout : float, optional
        Seconds that a barrier may last; None: as long as every process lives.
    spin : bool
        Whether a waiter may keep its core busy for a moment.
    """

    def __init__(self, size, master_rank=0, timeout=None, spin=True):
        if size > 1:
            limits.check_may_have_children()
        self.size, self.rank, self.master_rank = size, master_rank, master_rank
        self.timeout = timeout
        try:
            self.memory = SharedMemory(size)
        except OSError as error:
            raise limits.too_many_files(error) from error
        self.memory.use_span(master_rank)
        self._workers = [rank for rank in range(size) if rank != master_rank]
        self._processes = {}
        self._master_pid = os.getpid()
        self._most_spins = _MOST_SPINS if spin else 0
        self._spins = self._most_spins
        self._make_boxes()
        rounds = (size - 1).bit_length()
        semaphores = make_semaphores((2 + rounds) * size)
        self._starts = [next(semaphores) for _ in range(size)]
        self._finishes = [next(semaphores) for _ in range(size)]
        self._barriers = [[next(semaphores) for _ in range(rounds)] for _ in range(size)]
        self._find_partners()
        self._at_exit = None

    def _make_boxes(self):
        memory = self.memory
        self._mailbox = _Box(memory, _MAILBOX_BYTES)
        self._replies = [_Box(memory, _SLOT_BYTES) for _ in range(self.size)]
        # Two slots a rank, in turn: whoever writes the one of this exchange has passed the barrier of
        # the last, so every rank has read the other.
        self._slots = [[_Box(memory, _SLOT_BYTES) for _ in range(self.size)] for _ in range(2)]
        self._turn = 0
        self._passed = 0  # barriers inside this command
        self._aborted = memory.empty((1,), "int64").data  # from which barrier on, counted from 1
        self._aborted[0] = 0
        self._commands = 0
        self._has_cores = memory.empty((1,), "int64").data  # whether there is one for each rank
        self._has_cores[0] = True

    def _find_partners(self):
        self._partners = [
            (self._barriers[(self.rank + (1 << k)) % self.size][k], semaphore)
            for k, semaphore in enumerate(self._barriers[self.rank])
        ]

    # Starting and ending

    def start(self, serve):
        context = multiprocessing.get_context("fork")
        die_with_parent = threading.current_thread() is threading.main_thread()
        # A child of multiprocessing ends without the functions of `atexit`.
        self._at_exit = multiprocessing.util.Finalize(None, self.kill, exitpriority=1)
        # Until a worker has seen to them, its signals wait.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            for rank in self._workers:
                process = context.Process(
                    target=self._become_worker,
                    args=(rank, serve, die_with_parent, mask),
                    name=f"synkhronos-{rank}",
                    daemon=True,
                )
                process.start()
                self._processes[rank] = process
        except OSError as error:
            started = len(self._processes)
            self.kill()
            raise limits.too_many_workers(error, started, len(self._workers)) from error
        except BaseException:
            self.kill()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _become_worker(self, rank, serve, die_with_parent, mask):
        leave_to_master()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if die_with_parent and sys.platform == "linux":
            # The signal comes as the *thread* that forked ends: right only for the main thread.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self.rank = rank
        self._processes = {}
        self.memory.use_span(rank)
        self._find_partners()
        self._see_master()
        serve()

    def close(self, grace):
        deadline = time.monotonic() + grace
        if not self.is_master_process():
            self._processes = {}  # those of the process that this one was forked from
        try:
            for process in self._processes.values():
                process.join(max(0, deadline - time.monotonic()))
        finally:
            self.kill()
            self._close_semaphores()

    def _close_semaphores(self):
        semaphores = [*self._starts, *self._finishes, *itertools.chain(*self._barriers)]
        self._starts = self._finishes = self._barriers = ()
        for semaphore in semaphores:
            semaphore.close()

    def kill(self):
        if self._at_exit is not None:
            self._at_exit.cancel()
        for process in self._processes.values():
            process.kill()
        processes, self._processes = self._processes, {}
        for process in processes.values():
            process.join()
            process.close()

    def is_master_process(self):
        return os.getpid() == self._master_pid

    # Between master and workers

    def post(self, payload):
        self._turn = self._passed = 0  # a rank that failed may have passed fewer than the others
        if self._most_spins and self._commands % _COUNT_CORES == 0:
            pids = [process.pid for process in self._processes.values()]
            self._has_cores[0] = affinity([0, *pids]) >= self.size
        self._commands += 1
        self._mailbox.put(payload)
        for rank in self._workers:
            self._starts[rank].release()

    def collect(self):
        replies = [None] * self.size
        for rank in self._workers:
            self._wait(self._finishes[rank])
            replies[rank] = self._replies[rank].get()
        self._mailbox.clear()
        if self._aborted[0]:
            self._aborted[0] = 0
            for semaphore in itertools.chain.from_iterable(self._barriers):
                drain(semaphore)
        return replies

    def receive(self):
        self._wait(self._starts[self.rank], patient=True)
        self._turn = self._passed = 0
        return self._mailbox.get()

    def reply(self, payload):
        self._replies[self.rank].put(payload)
        self._finishes[self.rank].release()

    # Among all ranks

    def barrier(self):
        for theirs, ours in self._partners:
            theirs.release()
            self._wait(ours)
            # A rank that failed after it passed this barrier was here, as all ranks then are.
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
                    semaphore.release()

    # Waiting

    def _wait(self, semaphore, patient=False):
        """Wait for a post. `patient`: however long the master takes for its next command."""
        began = time.monotonic()
        for spin in range(self._spins if self._has_cores[0] else 0):
            if semaphore.value:
                semaphore.acquire()
                return
            if spin & 63 == 63:
                os.sched_yield()  # who posts may be waiting for this very core
        while True:
            try:
                semaphore.acquire(_LOOK)
                break
            except posix_ipc.SignalError:  # a handler of the script's ran: not for us
                continue
            except posix_ipc.BusyError:
                pass
            self._look(0 if patient else time.monotonic() - began)
        # Spin longer next time if that would have saved the sleep, else less.
        if time.monotonic() - began < _LONGEST_SPIN:
            self._spins = self._most_spins
        else:
            self._spins = max(self._spins // 2, min(self._spins, _FEWEST_SPINS))

    def _look(self, waited):
        if self.rank != self.master_rank:
            return self._see_master()
        self._see_workers()
        self.while_waiting()
        if self.timeout is not None and waited > self.timeout:
            self.kill()
            raise WorldBrokenError(
                f"a barrier lasted longer than fork(timeout={self.timeout}) seconds; every worker "
                f"was ended; only close() is left"
            )

    def _see_master(self):
        if os.getppid() != self._master_pid:
            os._exit(1)

    def _see_workers(self):
        """Raise `WorldBrokenError`, and end all workers, if one of them is dead."""
        if not self._processes:
            raise WorldBrokenError("the workers were ended from another thread; only close() is left")
        sentinels = [process.sentinel for process in self._processes.values()]
        closed = multiprocessing.connection.wait(sentinels, 0)
        if not closed:
            return
        causes = []
        for rank, process in self._processes.items():
            if process.sentinel in closed:
                process.join(_DYING)  # its files are closed before its memory is given back
                causes.append(f"rank {rank} ({_describe_exit(process.exitcode)})")
        self.kill()
        raise WorldBrokenError(
            f"a worker died: {', '.join(causes)}; the others were ended; only close() is left"
        )


class _Box:
    """A place in shared memory for bytes of any length; long ones get a block of their own."""

    def __init__(self, memory, nbytes):
        self._memory = memory
        # The place and length of what is in the box, then room for it.
        block = memory.allocate(16 + nbytes)
        self._header = block[:16].data.cast("q")
        self._start = memory.reference(block)[0] + 16
        self._nbytes = nbytes
        self._long = None

    def put(self, payload):
        self._long = None
        start, nbytes = self._start, len(payload)
        if nbytes > self._nbytes:
            self._long = self._memory.allocate(nbytes)
            start = self._memory.reference(self._long)[0]
        self._memory.mapping[start : start + nbytes] = payload
        self._header[0], self._header[1] = start, nbytes

    def clear(self):
        self._long = None

    def get(self):
        start, nbytes = self._header
        return self._memory.mapping[start : start + nbytes]


def _disown_workers():
    """In a process that the script forks: multiprocessing would end the workers as it exits."""
    children = multiprocessing.process._children
    children -= {child for child in children if child.name.startswith("synkhronos-")}


os.register_at_fork(after_in_child=_disown_workers)


def _describe_exit(code):
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
