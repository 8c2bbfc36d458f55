"""The workers and service processes that the master forks. None of them outlives it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping

from synkhronos.host.descriptors import open_unnamed
from synkhronos.host.log import LogRelay
from synkhronos.host.signals import (
    ENDING,
    DeferredSignals,
    die_with_parent,
    handled_signals,
    ignore_signals_for_the_master,
)
from synkhronos.transports.base import ServiceProcess
from synkhronos.transports.fork_locks import GeneratorLocks

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess
    from multiprocessing.process import BaseProcess

    from synkhronos._typing import T


class Children:
    """The children of the master.

    Attributes
    ----------
    workers : dict
        The processes of the workers, by rank. It is empty in every other process.
    service_processes : list
        The other processes.
    are_ended : bool
        Whether `kill` was called since the last children were started.
    log : LogRelay or None
        Where they send their records.
    """

    def __init__(self) -> None:
        self.workers: dict[int, ForkProcess] = {}
        self.service_processes: list[ForkProcess] = []
        self.are_ended = True
        self.log: LogRelay | None = None
        self._forker = Forker()
        self._at_exit: multiprocessing.util.Finalize | None = None
        self._locks = GeneratorLocks()
        self._mask: Iterable[int] = ()  # the signals that were blocked before the fork

    def relay_log(self) -> None:
        """Let the script's handlers emit the records of the children that are forked from now on."""
        self.log = LogRelay(open_unnamed("synkhronos-log"))

    def emit_log(self) -> None:
        """Let the script's handlers emit the records that have come since the last call."""
        if self.log is not None and self.log.has_records[0]:
            self.log.emit()

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that forks children; signals with handlers are deferred meanwhile."""
        with DeferredSignals():
            return self._forker.call(self._run, function, args)

    def _run(self, function: Callable[..., T], args: tuple) -> T:
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

    def fork_worker(self, rank: int, become: Callable[[], None]) -> None:
        """Start a worker, which calls ``become()``."""
        # First, so an interrupt cannot leave it behind
        self.workers[rank] = self._prepare(str(rank), become)
        self._start(self.workers[rank])

    def fork_service_process(self, name: str, serve: Callable[[], None]) -> ServiceProcess:
        """Start a process that is not a rank and calls ``serve()``; return its `ServiceProcess`."""
        self.end_service_processes(0)  # left by a program that was interrupted
        return _ForkedServiceProcess(self, self.fork_further(name, serve))

    def fork_further(self, name: str, serve: Callable[[], None]) -> ForkProcess:
        """Start another process that is not a rank and calls ``serve()``."""
        process = self._prepare(name, serve)
        self.service_processes.append(process)
        self._start(process)
        return process

    def _start(self, process: ForkProcess) -> None:
        # No signal handler may run meanwhile: the callbacks of `os.fork` drop exceptions.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled_signals())
        try:
            with self._locks, warnings.catch_warnings():
                # So does Python from 3.12 on; the world itself warns of the script's threads.
                warnings.filterwarnings("ignore", "This process .* multi-threaded", DeprecationWarning)
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def end_service_processes(self, grace: float) -> None:
        """Wait `grace` seconds for the service processes to end, then kill them."""
        service_processes, self.service_processes = self.service_processes, []
        for process in service_processes:
            if process.pid is not None:
                process.join(grace)
        kill_and_join(service_processes)

    def _prepare(self, name: str, become: Callable[[], None]) -> ForkProcess:
        def target() -> None:
            self._locks.give_back()
            die_with_parent()
            ignore_signals_for_the_master()
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self.workers, self.service_processes = {}, []
            if self.log is not None:
                self.log.redirect()
            # Daemonic for the master, which ends it. But its operations may use multiprocessing.
            multiprocessing.current_process().daemon = False
            become()

        context = multiprocessing.get_context("fork")
        return context.Process(target=target, name=f"synkhronos-{name}", daemon=True)

    def discard(self, rank: int) -> None:
        """Forget a dead worker."""
        kill_and_join([self.workers.pop(rank)])

    def find_dead(self) -> dict[int, str]:
        """Return ``{rank: cause}`` for the workers that have ended."""
        return find_dead(self.workers)

    def find_stopped(self) -> list[int]:
        """Return the ranks of the workers that are stopped by a signal."""
        return [rank for rank, pid in zip(self.workers, self.pids()) if status(pid) == "stopped"]

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [process.pid for process in self.workers.values()]  # type: ignore[misc]  # all were started

    def close(self, grace: float) -> None:
        """Wait `grace` seconds for the workers to end, then kill the others."""
        deadline = time.monotonic() + grace
        try:
            for process in self.workers.values():
                process.join(max(0, deadline - time.monotonic()))
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill all children."""
        self.are_ended = True
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None
        workers, self.workers = self.workers, {}
        kill_and_join(workers.values())
        self.end_service_processes(0)
        self._forker.end()
        if self.log is not None:
            self.log.close()
            self.log = None


class _ForkedServiceProcess(ServiceProcess):
    def __init__(self, children: Children, process: ForkProcess) -> None:
        self._children, self._process = children, process

    def is_alive(self) -> bool:
        return self._process in self._children.service_processes and is_running(self._process)

    def end(self, grace: float) -> None:
        if self._process in self._children.service_processes:
            self._children.end_service_processes(grace)


class Forker:
    """Calls a function that forks, in a thread that lives until `end`, like the main thread.

    After `die_with_parent`, a child is killed when the *thread* that forked it ends.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call ``function(*args)``; return its value or raise its exception."""
        if threading.current_thread() is threading.main_thread():
            return function(*args)
        outcome: list[tuple[Any, BaseException | None]] = []
        done, ended = threading.Event(), self._ended

        def run() -> None:
            try:
                outcome.append((function(*args), None))
            except BaseException as error:
                outcome.append((None, error))
            done.set()
            ended.wait()

        threading.Thread(target=run, name="synkhronos-forker", daemon=True).start()
        done.wait()
        result, error = outcome.pop()
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """Let the threads end, when there are no more children."""
        self._ended.set()
        self._ended = threading.Event()  # if it is called again


# One process, or some of them


def find_dead(processes: Mapping[int, BaseProcess]) -> dict[int, str]:
    """Return ``{rank: cause}`` for the processes in ``{rank: process}`` that have ended."""
    causes = {}
    for rank, process in processes.items():
        if not is_running(process):
            with DeferredSignals():  # multiprocessing drops any OSError here, also that of a handler
                causes[rank] = _describe_exit(process.exitcode)
    return causes


def is_running(process: BaseProcess) -> bool:
    """Whether a child runs.

    Its sentinel may be open in a process that it has started, and closed by code of the user. Its method
    ``is_alive`` would drop an ``OSError`` of a signal handler.
    """
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None  # type: ignore[arg-type]  # it was started
    except ChildProcessError:  # reaped by the script, by the kernel for it, or by multiprocessing
        return False


def has_ended(pid: int) -> bool:
    """Whether a process of this machine has ended, even if its exit code has not been read yet."""
    return status(pid) in (None, "zombie", "dead")


def status(pid: int) -> str | None:
    """Return psutil's name of the state of a process; None if there is no such process."""
    import psutil  # takes 6 ms, so not at import

    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return None


def kill_and_join(processes: Iterable[BaseProcess]) -> None:
    """Kill the processes that were started, and wait until they have ended."""
    with DeferredSignals():
        processes = [process for process in processes if process.pid is not None]
        for process in processes:
            try:
                process.kill()
            except ProcessLookupError:
                pass  # dead, and reaped by the script
        for process in processes:
            process.join()
            try:
                process.close()
            except ValueError:
                pass  # here, too, multiprocessing never sees it end


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "exit code unknown: the script ignores or reaps its children itself"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _disown() -> None:
    """Called in a process that the script forks. Otherwise its exit would end the workers."""
    children = multiprocessing.process._children  # type: ignore[attr-defined]  # it is internal
    children -= {child for child in children if child.name.startswith("synkhronos-")}


os.register_at_fork(after_in_child=_disown)
