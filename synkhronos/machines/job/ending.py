"""Ending a job from one of its tasks, and what a job leaves on a machine.

When mpirun ends a job, it waits for its daemons on all machines; with one that is silent, it waits for
ever. It ends at once when it gets SIGTERM for the second time. With ULFM, it goes on when a task dies,
which the others notice only after MPI is initialized. Before, they would wait in ``MPI_Init`` for ever,
so each task starts a guard. If mpirun is killed by SIGKILL, OpenMPI's files in ``/dev/shm`` stay, and
occupy memory. It may end before the tasks of a machine do, and never ends those of a machine that it
cannot reach. Before a job is started again, ``launch`` runs this file by its path, without the package,
which would take seconds to import.
"""

import os
import re
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Iterable, List, Optional

# What has started a task: mpirun itself, or its daemon on another machine. OpenMPI 4 and 5
_MPIRUNS = ("mpirun", "mpirun.openmpi", "mpiexec", "orterun", "prterun", "prte")
_STARTERS = (*_MPIRUNS, "orted", "prted")
_PATIENCE = 0.6  # seconds between two signals; meanwhile, mpirun sends SIGTERM to the tasks
_POLL_INTERVAL = 0.02  # seconds

#: Where the number of a file descriptor is by which a task tells its guard how its start has ended
DESCRIPTOR = "SYNKHRONOS_START_GUARD"
_INTERVAL = 0.5  # seconds between two looks at mpirun
_GRACE = 1.0  # seconds in which a job that ends anyway has ended
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

#: The folder of OpenMPI's files, by which processes of a machine exchange messages
SHARED_MEMORY = Path("/dev/shm")
_PROCESSES = Path("/proc")
# A file has a mapping a moment after it was made. What is younger may belong to a job that starts.
_AGE = 2.0  # seconds

_LEAVING = 3.0  # seconds for the processes of a job to end by themselves
_DYING = 5.0  # seconds


def find_starter() -> Optional[int]:
    """Return the process id of the mpirun, or of its daemon, that has started this process.

    Return None if something else has, such as srun.
    """
    import psutil  # takes 6 ms, so not at import

    parents = psutil.Process().parents()
    return next((parent.pid for parent in parents if parent.name() in _STARTERS), None)


def is_beside_mpirun() -> bool:
    """Whether mpirun itself, and not one of its daemons, has started this process."""
    import psutil

    starter = find_starter()
    return starter is not None and psutil.Process(starter).name() in _MPIRUNS


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
    for task in (pid, *tasks):
        with suppress(psutil.NoSuchProcess):
            everything.append(psutil.Process(task))  # which knows when the number is used again
    if os.fork():
        return
    try:
        os.setsid()
        for name in os.listdir("/proc/self/fd"):  # so that no reader waits for this process
            with suppress(OSError):
                os.close(int(name))
        for process in everything:
            for number in [signal.SIGTERM] * 2 * (process.pid == pid) + [signal.SIGKILL]:
                with suppress(psutil.Error):
                    process.send_signal(number)
                    if process.pid == pid:
                        process.wait(_PATIENCE)
    finally:
        os._exit(0)


def start_reader(function: Callable[..., None], *args: Any) -> int:
    """Let a process of its own call ``function(reading, *args)``; return the other end of the pipe.

    It is a grandchild: this process does not wait for it, and does not know of it when it ends.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(writing)
            if not os.fork():
                function(reading, *args)
        finally:
            os._exit(0)
    os.close(reading)
    os.waitpid(child, 0)
    return writing


# The guard of a task, with ULFM


def watch_start() -> None:
    """Start the guard of this task, whose environment then has `DESCRIPTOR`, also after ``exec``."""
    import psutil

    starter, task = find_starter(), psutil.Process()
    if starter is None:
        return
    writing = start_reader(_guard, starter, task)
    os.set_inheritable(writing, True)
    os.environ[DESCRIPTOR] = str(writing)


def end_watch() -> None:
    """Tell the guard of this task, if there is one, that MPI is initialized."""
    number = os.environ.pop(DESCRIPTOR, "")
    if number:
        with suppress(OSError):  # the guard has ended
            os.write(int(number), b"initialized")
            os.close(int(number))


def _guard(reading: int, starter: int, task: Any) -> None:
    """Wait until the task has initialized MPI; if it has ended before, end the job."""
    import psutil  # takes 6 ms, so not at import

    os.setsid()  # so that mpirun does not end this process with the task
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    while os.path.exists(f"/proc/{starter}"):
        if select.select([reading], [], [], _INTERVAL)[0]:
            if os.read(reading, 1):
                return
            break  # the task has ended
    with suppress(psutil.Error):
        psutil.Process(starter).wait(_GRACE)  # the job may end anyway
    if os.path.exists(f"/proc/{starter}"):
        from synkhronos.machines.job import reports

        reports.report(reports.DIED, socket.gethostname())
        time.sleep(_GRACE)  # for the message, which mpirun passes on
        with suppress(psutil.Error):
            process = psutil.Process(starter)
            others = process.children()
            if process.name() in _MPIRUNS:
                end_job(starter, [other.pid for other in others])
            else:  # mpirun goes on if a daemon ends as SIGTERM asks it to, but not if it is lost
                for item in (process, *others):
                    item.kill()
    with suppress(psutil.Error):
        task.kill()  # if it lives: it may ignore SIGTERM


# What killed jobs have left


def sweep(folder: Path = SHARED_MEMORY) -> List[str]:
    """Remove the files of OpenMPI that are this user's and that no process uses; return their names.

    Only files of this host are removed: containers may share ``/dev/shm``, and do not see each other's
    processes.
    """
    left = _candidates(folder)
    if left:
        left = _without_used(left)
    for name in left:
        with suppress(OSError):  # another task of this job has removed it
            os.unlink(folder / name)
    return left


def _candidates(folder: Path) -> List[str]:
    host = socket.gethostname()
    hosts = "|".join(re.escape(name) for name in (host, host.partition(".")[0]))
    # OpenMPI 4 and 5: host, user, job and process
    pattern = re.compile(rf"(vader|sm)_segment\.({hosts})\.{os.geteuid()}\.[0-9a-f]+\.\d+")
    found = []
    with suppress(OSError):  # there may be no such folder
        for entry in os.scandir(folder):
            if pattern.fullmatch(entry.name):
                with suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    if facts.st_uid == os.geteuid() and time.time() - facts.st_mtime > _AGE:
                        found.append(entry.name)
    return sorted(found)


def _without_used(names: Iterable[str]) -> List[str]:
    unused = list(names)
    for maps in _PROCESSES.glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or belongs to another user
            used = maps.read_text(errors="replace")
            unused = [name for name in unused if name not in used]
    return unused


def end_processes(variable: str) -> bool:
    """Wait for the end of this user's processes that have an environment variable, at last end them.

    Return whether all have ended.

    Parameters
    ----------
    variable : str
        ``NAME=VALUE``.
    """
    until = time.monotonic() + _LEAVING
    while find_processes(variable) and time.monotonic() < until:
        time.sleep(_POLL_INTERVAL)
    until = time.monotonic() + _DYING
    while True:
        left = find_processes(variable)
        if not left or time.monotonic() > until:
            return not left
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_INTERVAL)


def find_processes(variable: str) -> List[int]:
    """Return the processes that have an environment variable, ``NAME=VALUE``, except this one."""
    wanted, found = variable.encode(), []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with suppress(OSError):  # it has ended, or belongs to another user
                with open(f"/proc/{name}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0"):  # a zombie has none
                        found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(0 if end_processes(sys.argv[1]) else 1)
