"""Files that killed MPI jobs have left in ``/dev/shm``, which the next job removes.

OpenMPI's processes of a machine exchange messages by such files, which each of them unlinks at its end.
If mpirun is killed by SIGKILL, they end without that, and the memory stays occupied.
"""

import os
import re
import socket
import time
from pathlib import Path
from typing import Iterable, List

from synkhronos.host.handler_errors import suppress

FOLDER = Path("/dev/shm")

_PROCESSES = Path("/proc")
# A file has a mapping a moment after it was made. What is younger may belong to a job that starts.
_AGE = 2.0  # seconds


def sweep(folder: Path = FOLDER) -> List[str]:
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
