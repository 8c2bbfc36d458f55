"""Ranks on one machine: forked processes, shared memory, POSIX semaphores.

How a command travels. The master writes its bytes into the mailbox and posts each worker's *start*
semaphore; a worker writes its reply into a slot of its own and posts its *finish* semaphore. Bytes
that are too long for mailbox or slot get a block of shared memory.

Inside a command ranks meet at a dissemination barrier: in round k rank r posts rank ``r + 2**k`` and
waits for rank ``r - 2**k``, which takes ``ceil(log2(size))`` rounds [1]_.

How to wait. A waiter first looks at the semaphore in a loop for a moment, if there is a core for each
rank (a core that sleeps takes ten times longer to answer), and longer the more often that helps. Then
it sleeps in the kernel, but wakes a few times a second to see that the others live: the master by the
workers' process sentinels, a worker by its parent's process id.

The semaphores' names exist for as long as it takes to remove them again.

.. [1] Hensgen, Finkel, Manber: Two algorithms for barrier synchronization, 1988.
"""

import ctypes
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time

import posix_ipc

from synkhronos._errors import REMEDY, CollectiveAbortedError, SynkhronosError, WorldBrokenError
from synkhronos.transports.base import Transport
from synkhronos.transports.shm import SharedMemory

_MAILBOX_BYTES = 1 << 20
_SLOT_BYTES = 1 << 16
_LOOK = 0.2  # seconds between two looks at whether the others live
_FEWEST_SPINS, _MOST_SPINS = 64, 4096  # looks at a semaphore, each some 50 nanoseconds
_LONGEST_SPIN = 2e-4  # seconds, about that of the most
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
    memory : SharedMemory, optional
        That of a transport whose workers have ended or will have before `start`; else new memory.
    """

    def __init__(self, size, master_rank=0, timeout=None, spin=True, memory=None):
        self.size, self.rank, self.master_rank = size, master_rank, master_rank
        self.timeout = timeout
        self.memory = SharedMemory(size) if memory is None else memory
        self._workers = [rank for rank in range(size) if rank != master_rank]
        self._processes = {}
        self._master_pid = os.getpid()
        self._most_spins = _MOST_SPINS if spin else 0
        self._spins = self._most_spins
        self._make_boxes()
        self._starts = [_semaphore() for _ in range(size)]
        self._finishes = [_semaphore() for _ in range(size)]
        rounds = (size - 1).bit_length()
        self._barriers = [[_semaphore() for _ in range(rounds)] for _ in range(size)]
        self._find_partners()

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

    def _find_partners(self):
        self._partners = [
            (self._barriers[(self.rank + (1 << k)) % self.size][k], semaphore)
            for k, semaphore in enumerate(self._barriers[self.rank])
        ]

    # Starting and ending

    def start(self, serve):
        context = multiprocessing.get_context("fork")
        die_with_parent = threading.current_thread() is threading.main_thread()
        try:
            for rank in self._workers:
                process = context.Process(
                    target=self._become_worker,
                    args=(rank, serve, die_with_parent),
                    name=f"synkhronos-{rank}",
                    daemon=True,
                )
                process.start()
                self._processes[rank] = process
        except AssertionError as error:
            raise SynkhronosError(
                "fork(): this process is itself a daemonic worker of multiprocessing, which may not "
                "have children; call fork() in the main process, or start this one with daemon=False"
            ) from error
        except BaseException:
            self._kill()
            raise

    def _become_worker(self, rank, serve, die_with_parent):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the master's to answer
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if die_with_parent and sys.platform == "linux":
            # The signal comes as the *thread* that forked ends: right only for the main thread.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self.rank = rank
        self._processes = {}
        self.memory.use_span((rank - self.master_rank) % self.size)  # the master's is the first
        self._find_partners()
        self._see_master()
        serve()

    def close(self, grace):
        deadline = time.monotonic() + grace
        for process in self._processes.values():
            process.join(max(0, deadline - time.monotonic()))
        self._kill()
        semaphores = [*self._starts, *self._finishes, *itertools.chain(*self._barriers)]
        self._starts = self._finishes = self._barriers = ()
        for semaphore in semaphores:
            semaphore.close()

    def _kill(self):
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
            process.close()
        self._processes = {}

    def is_master_process(self):
        return os.getpid() == self._master_pid

    # Between master and workers

    def post(self, payload):
        self._turn = self._passed = 0  # a rank that failed may have passed fewer than the others
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
                _drain(semaphore)
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
        for spin in range(self._spins):
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
        if self.timeout is not None and waited > self.timeout:
            self._kill()
            raise WorldBrokenError(
                f"a barrier lasted longer than fork(timeout={self.timeout}) seconds; every worker "
                f"was ended; {REMEDY}"
            )

    def _see_master(self):
        if os.getppid() != self._master_pid:
            os._exit(1)

    def _see_workers(self):
        """Raise `WorldBrokenError`, and end all workers, if one of them is dead."""
        sentinels = [process.sentinel for process in self._processes.values()]
        if not multiprocessing.connection.wait(sentinels, 0):
            return
        causes = [
            f"rank {rank} ({_describe_exit(process.exitcode)})"
            for rank, process in self._processes.items()
            if not process.is_alive()
        ]
        self._kill()
        raise WorldBrokenError(
            f"a worker died: {', '.join(causes)}; the others were ended; {REMEDY}"
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


def _semaphore():
    """Return a new semaphore at zero that has no name any more."""
    try:
        # The random names of posix_ipc itself depend on the second at which it was imported only.
        name = f"/synkhronos-{os.urandom(16).hex()}"
        semaphore = posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600, initial_value=0)
    except OSError as error:
        raise SynkhronosError(
            f"fork(): no POSIX semaphore could be made ({error}); /dev/shm must be mounted and "
            f"writable"
        ) from error
    semaphore.unlink()
    return semaphore


def _disown_workers():
    """In a process that the script forks: multiprocessing would end the workers as it exits."""
    children = multiprocessing.process._children
    children -= {child for child in children if child.name.startswith("synkhronos-")}


os.register_at_fork(after_in_child=_disown_workers)


def _drain(semaphore):
    while semaphore.value:
        semaphore.acquire()


def _describe_exit(code):
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
