"""The processes that the master forks: workers and attendants. None of them outlives the master."""

import multiprocessing
import multiprocessing.util
import os
import signal
import time
import warnings

from synkhronos.host.signals import (
    ENDING,
    DeferredSignals,
    handled_signals,
    ignore_signals_for_the_master,
)
from synkhronos.transports import liveness
from synkhronos.transports.base import Attendant
from synkhronos.transports.fork_locks import GeneratorLocks


class Children:
    """The children of the master.

    Attributes
    ----------
    workers : dict
        The processes of the workers, by rank. It is empty in every other process.
    attendants : list
        The other processes.
    are_ended : bool
        Whether `kill` was called since the last ones were started.
    """

    def __init__(self):
        self.workers, self.attendants = {}, []
        self.are_ended = True
        self._forker = liveness.Forker()
        self._at_exit = None
        self._locks = GeneratorLocks()
        self._mask = None

    def run(self, function, *args):
        """Call a function that forks children; signals with handlers are deferred meanwhile."""
        with DeferredSignals():
            return self._forker.call(self._run, function, args)

    def _run(self, function, args):
        if self._at_exit is None:
            # A child of multiprocessing ends without calling the functions of `atexit`.
            self._at_exit = multiprocessing.util.Finalize(None, self.kill, exitpriority=1)
        self.are_ended = False
        # A child's signals are blocked until it has set their handlers.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            return function(*args)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def fork_worker(self, rank, become):
        """Start a worker, which calls ``become()``."""
        self.workers[rank] = self._prepare(str(rank), become)  # first, so no interrupt leaves it behind
        self._start(self.workers[rank])

    def fork_attendant(self, name, serve):
        """Start a process that is not a rank and calls ``serve()``; return its `Attendant`."""
        self.end_attendants(0)  # left by a program that was interrupted
        process = self._prepare(name, serve)
        self.attendants.append(process)
        self._start(process)
        return _ForkedAttendant(self, process)

    def _start(self, process):
        # No signal handler may run meanwhile: the callbacks of `os.fork` drop exceptions.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled_signals())
        try:
            with self._locks, warnings.catch_warnings():
                # So does Python from 3.12 on; the world itself warns of the script's threads.
                warnings.filterwarnings("ignore", "This process .* multi-threaded", DeprecationWarning)
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def end_attendants(self, grace):
        """Wait `grace` seconds for the attendants to end, then kill them."""
        attendants, self.attendants = self.attendants, []
        for process in attendants:
            if process.pid is not None:
                process.join(grace)
        liveness.end(attendants)

    def _prepare(self, name, become):
        def target():
            self._locks.give_back()
            liveness.die_with_parent()
            ignore_signals_for_the_master()
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self.workers, self.attendants = {}, []
            # Daemonic for the master, which ends it. But its operations may use multiprocessing.
            multiprocessing.current_process().daemon = False
            become()

        context = multiprocessing.get_context("fork")
        return context.Process(target=target, name=f"synkhronos-{name}", daemon=True)

    def discard(self, rank):
        """Forget a dead worker."""
        liveness.end([self.workers.pop(rank)])

    def find_dead(self):
        """Return ``{rank: cause}`` for the workers that have ended."""
        return liveness.find_dead(self.workers)

    def find_stopped(self):
        """Return the ranks of the workers that are stopped by a signal."""
        return liveness.find_stopped(self.workers)

    def pids(self):
        """Return the process ids of the workers."""
        return [process.pid for process in self.workers.values()]

    def close(self, grace):
        """Wait `grace` seconds for the workers to end, then kill the remaining ones."""
        deadline = time.monotonic() + grace
        try:
            for process in self.workers.values():
                process.join(max(0, deadline - time.monotonic()))
        finally:
            self.kill()

    def kill(self):
        """Kill all of them."""
        self.are_ended = True
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None
        workers, self.workers = self.workers, {}
        liveness.end(workers.values())
        self.end_attendants(0)
        self._forker.end()


class _ForkedAttendant(Attendant):
    def __init__(self, children, process):
        self._children, self._process = children, process

    def is_alive(self):
        return self._process in self._children.attendants and liveness.is_running(self._process)

    def end(self, grace):
        if self._process in self._children.attendants:
            self._children.end_attendants(grace)


def _disown():
    """Called in a process that the script forks. Otherwise its exit would end the workers."""
    children = multiprocessing.process._children
    children -= {child for child in children if child.name.startswith("synkhronos-")}


os.register_at_fork(after_in_child=_disown)
