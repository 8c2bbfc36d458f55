"""A watch over the start of the tasks of a machine, where OpenMPI's mpirun goes on when a task dies.

With ULFM, tasks notice a death only after MPI is initialized. Before, the others would wait in
``MPI_Init`` for ever. So each task starts a small process, which ends the job if a task of its machine
ends, and itself ends when its task has initialized MPI.
"""

import os
import select
import signal
import socket
import sys
import time
from typing import Set

from synkhronos.host.handler_errors import suppress
from synkhronos.machines.job import termination

#: Where the number of a file descriptor is by which a task tells its guard how its start has ended
DESCRIPTOR = "SYNKHRONOS_START_GUARD"
#: What is written to stderr
DIED = "a task on {} has died before all tasks had initialized MPI"

_INTERVAL = 0.5  # seconds between two looks at the tasks
_PATIENCE = 10.0  # seconds until every task of the machine has been seen
_GRACE = 1.0  # seconds in which a job that ends anyway has ended
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def watch_start() -> None:
    """Start the guard of this task, whose environment then has `DESCRIPTOR`, also after ``exec``."""
    pid = termination.find_starter()
    tasks = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    if pid is None or not tasks.isdecimal():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(writing)
            if not os.fork():  # a grandchild, which the task does not have to wait for
                _guard(reading, pid, int(tasks))
        finally:
            os._exit(0)
    os.close(reading)
    os.waitpid(child, 0)
    os.set_inheritable(writing, True)
    os.environ[DESCRIPTOR] = str(writing)


def end_watch() -> None:
    """Tell the guard of this task, if there is one, that MPI is initialized."""
    number = os.environ.pop(DESCRIPTOR, "")
    if number:
        with suppress(OSError):  # the guard has ended
            os.write(int(number), b"initialized")
            os.close(int(number))


def _guard(reading: int, pid: int, count: int) -> None:
    """Wait until the task has started, or until a task of this machine has ended."""
    os.setsid()  # so that mpirun does not end this process with the task
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    tasks: Set[int] = set()
    until = time.monotonic() + _PATIENCE
    while os.path.exists(f"/proc/{pid}"):
        if len(tasks) < count:
            tasks |= _tasks_of(pid)
        is_missing = len(tasks) < count and time.monotonic() > until
        if is_missing or any(_parent(one) != pid for one in tasks):
            break
        if select.select([reading], [], [], _INTERVAL)[0]:
            if os.read(reading, 1):
                return
            break  # the task has ended
    _end(pid, tasks)


def _end(pid: int, tasks: Set[int]) -> None:
    """End a job, unless it ends anyway, and its tasks here."""
    import psutil  # takes 6 ms, so not at import

    with suppress(psutil.Error):
        psutil.Process(pid).wait(_GRACE)
    if os.path.exists(f"/proc/{pid}"):
        os.write(2, f"python -m synkhronos: {DIED.format(socket.gethostname())}\n".encode())
        time.sleep(_GRACE)  # for the message, which mpirun passes on
        termination.end_job(pid, tasks)
        return
    for one in tasks:  # the script's ignores SIGTERM
        with suppress(psutil.NoSuchProcess):
            psutil.Process(one).kill()


def _tasks_of(pid: int) -> Set[int]:
    """Return the tasks that mpirun, or its daemon, has started and that can be recognized.

    While a task replaces itself by another program, it cannot be.
    """
    import psutil

    found = set()
    with suppress(psutil.Error):
        for one in psutil.Process(pid).children():
            with suppress(psutil.Error):
                if "OMPI_COMM_WORLD_RANK" in one.environ():
                    found.add(one.pid)
    return found


def _parent(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    with suppress(OSError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
        return 0 if state in "ZX" else int(parent)
    return 0
