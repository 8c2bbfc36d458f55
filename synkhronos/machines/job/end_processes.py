"""The end of what a job has left on a machine, before it is started again there.

``launch`` runs this file by its path, without the package, which would take seconds to import. mpirun
may end before the tasks of a machine do, and never ends those of a machine that it cannot reach.
"""

import os
import signal
import sys
import time
from typing import List

_PATIENCE = 3.0  # seconds for the processes to end by themselves
_DYING = 5.0  # seconds
_POLL_INTERVAL = 0.05  # seconds


def end_processes(variable: str) -> bool:
    """Wait for the end of this user's processes that have an environment variable, at last end them.

    Return whether all have ended.

    Parameters
    ----------
    variable : str
        ``NAME=VALUE``.
    """
    until = time.monotonic() + _PATIENCE
    while find(variable) and time.monotonic() < until:
        time.sleep(_POLL_INTERVAL)
    until = time.monotonic() + _DYING
    while True:
        left = find(variable)
        if not left or time.monotonic() > until:
            return not left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(_POLL_INTERVAL)


def find(variable: str) -> List[int]:
    """Return the processes that have an environment variable, ``NAME=VALUE``, except this one."""
    wanted, found = variable.encode(), []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0"):  # a zombie has none
                        found.append(int(name))
            except OSError:
                pass  # it has ended, or belongs to another user
    return found


if __name__ == "__main__":
    sys.exit(0 if end_processes(sys.argv[1]) else 1)
