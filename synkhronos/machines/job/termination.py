"""Ending a job from one of its tasks, also if some machines cannot be reached any more.

When mpirun ends a job, it waits for its daemons on all machines; with one that is silent, it waits for
ever. It ends at once when it gets SIGTERM for the second time.
"""

import os
import signal
import time
from typing import Any, Iterable, Optional

# What has started a task: mpirun itself, or its daemon on another machine. OpenMPI 4 and 5
_STARTERS = ("mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "prte")
_PATIENCE = 0.6  # seconds between two signals; meanwhile, mpirun sends SIGTERM to the tasks
_POLL_INTERVAL = 0.02  # seconds


def find_starter() -> Optional[int]:
    """Return the process id of the mpirun, or of its daemon, that has started this process.

    Return None if something else has, such as srun.
    """
    import psutil  # takes 6 ms, so not at import

    parents = psutil.Process().parents()
    return next((one.pid for one in parents if one.name() in _STARTERS), None)


def end_job(pid: int, tasks: Iterable[int]) -> None:
    """End a job by a new process, which goes on when this one is ended.

    Parameters
    ----------
    pid : int
        What `find_starter` has returned.
    tasks : iterable of int
        The process ids of tasks that are killed at last, if they live.
    """
    import psutil

    everything = []
    for one in (pid, *tasks):
        try:
            everything.append(psutil.Process(one))  # which knows when the number is used again
        except psutil.NoSuchProcess:
            pass
    if os.fork():
        return
    try:
        os.setsid()
        for name in os.listdir("/proc/self/fd"):  # so that no reader waits for this process
            _close(int(name))
        for process in everything:
            is_starter = process.pid == pid
            for number in [signal.SIGTERM] * 2 * is_starter + [signal.SIGKILL]:
                _send(process, number)
                if is_starter:
                    _wait(process)
    finally:
        os._exit(0)


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        pass  # it was the descriptor of the folder


def _send(process: Any, number: int) -> None:
    import psutil

    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass


def _wait(process: Any) -> None:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and process.is_running():
        time.sleep(_POLL_INTERVAL)
