"""Whether the workers are alive: why one ended, which are stopped, and that none outlives the master."""

import ctypes
import multiprocessing.connection
import signal
import sys
import threading

_DYING = 1.0  # seconds to wait for the exit code of a process that is ending
_PR_SET_PDEATHSIG = 1


def find_dead(processes):
    """Return ``{rank: cause}`` of those in ``{rank: process}`` that have ended."""
    # The sentinel stays open while a process that the worker has started holds a copy of it; the exit
    # code is never known if the script ignores SIGCHLD. Either of the two tells that a worker is dead.
    closed = multiprocessing.connection.wait([one.sentinel for one in processes.values()], 0)
    causes = {}
    for rank, process in processes.items():
        if process.sentinel in closed or not process.is_alive():
            process.join(_DYING)  # a process closes its files before it has an exit code
            causes[rank] = _describe_exit(process.exitcode)
    return causes


def find_stopped(processes):
    """Return the ranks of those in ``{rank: process}`` that a signal has stopped."""
    return [rank for rank, process in processes.items() if _is_stopped(process.pid)]


def _is_stopped(pid):
    import psutil  # takes 6 ms, and is not needed by an import of this package

    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def end(processes):
    """Kill the processes that have been started, and wait until they are gone."""
    processes = [process for process in processes if process.pid is not None]
    for process in processes:
        try:
            process.kill()
        except ProcessLookupError:
            pass  # dead, and the script has reaped it
    for process in processes:
        process.join()
        try:
            process.close()
        except ValueError:
            pass  # likewise: multiprocessing never sees it end


def die_with_parent():
    """Have the kernel kill this process when the thread that forked it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Forker:
    """Calls a function that forks in a thread that lives until `end`, as the main thread does.

    After `die_with_parent`, a child is killed when the *thread* that has forked it ends.
    """

    def __init__(self):
        self._ended = threading.Event()

    def call(self, function, *args):
        """Return what ``function(*args)`` returns, and raise what it raises."""
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
        """Let the threads end, once there are no children any more."""
        self._ended.set()
        self._ended = threading.Event()  # for another try


def _describe_exit(code):
    if code is None:
        return "exit code unknown: the script ignores or reaps its children itself"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
