"""Whether workers are alive, why they ended, and which are stopped. No worker outlives the master."""

import ctypes
import os
import signal
import sys
import threading

from synkhronos.host.signals import DeferredSignals

_PR_SET_PDEATHSIG = 1


def find_dead(processes):
    """Return ``{rank: cause}`` for the processes in ``{rank: process}`` that have ended."""
    causes = {}
    for rank, process in processes.items():
        if not is_running(process):
            with DeferredSignals():  # multiprocessing drops any OSError here, also that of a handler
                causes[rank] = _describe_exit(process.exitcode)
    return causes


def is_running(process):
    """Whether a child runs.

    Its sentinel may be open in a process that it has started, and closed by code of the user. Its method
    ``is_alive`` would drop an ``OSError`` of a signal handler.
    """
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # reaped by the script, by the kernel for it, or by multiprocessing
        return False


def find_stopped(processes):
    """Return the ranks of the processes in ``{rank: process}`` that are stopped by a signal."""
    return [rank for rank, process in processes.items() if _is_stopped(process.pid)]


def _is_stopped(pid):
    return _status(pid) == "stopped"


def has_ended(pid):
    """Whether a process of this machine has ended, even if its exit code has not been read yet."""
    return _status(pid) in (None, "zombie", "dead")


def _status(pid):
    """Return psutil's name of the state of a process; None if there is no such process."""
    import psutil  # takes 6 ms, so not at import

    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return None


def end(processes):
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


def die_with_parent():
    """Let the kernel kill this process when the thread that forked it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Forker:
    """Calls a function that forks, in a thread that lives until `end`, like the main thread.

    After `die_with_parent`, a child is killed when the *thread* that forked it ends.
    """

    def __init__(self):
        self._ended = threading.Event()

    def call(self, function, *args):
        """Call ``function(*args)``; return its value or raise its exception."""
        if threading.current_thread() is threading.main_thread():
            return function(*args)
        outcome, done, ended = [], threading.Event(), self._ended

        def run():
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

    def end(self):
        """Let the threads end, when there are no more children."""
        self._ended.set()
        self._ended = threading.Event()  # if it is called again


def _describe_exit(code):
    if code is None:
        return "exit code unknown: the script ignores or reaps its children itself"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
