"""How many cores and how much memory this process may use, and how many cores other programs use.

The limits of control groups are respected.
"""

import ctypes
import os
import time
from pathlib import Path
from typing import Iterable, List, Optional, Set

from synkhronos.host.handler_errors import reraise_if_handlers, suppress

#: Returns the number of the core on which the calling thread runs
_current_core = getattr(ctypes.CDLL(None), "sched_getcpu", None)

_CORE = 36  # index among the fields of /proc/PID/stat, counted from the state

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Count the cores that this process can keep busy, at least 1.

    The affinity mask and the processor quota of the control group are both respected. So the number is
    correct under ``taskset``, in a batch system and in a container, unlike `os.cpu_count`. A quota of
    two and a half cores counts as two: ranks wait for each other, so one throttled rank delays all.

    Parameters
    ----------
    proc, cgroups : Path, optional
        Where the ``proc`` and ``cgroup`` file systems are mounted.

    Returns
    -------
    int
        The number of cores.
    """
    count = affinity()
    quota = cpu_quota(proc, cgroups)
    if quota is not None:
        count = min(count, int(quota))
    return max(1, count)


def affinity(processes: Iterable[int] = (0,)) -> int:
    """Count the cores in the union of the affinity masks of some processes.

    Parameters
    ----------
    processes : iterable of int
        Process ids; 0 is this process. Processes that have ended are ignored.

    Returns
    -------
    int
        The number of cores.
    """
    found: Set[int] = set()
    for process in processes:
        with suppress(OSError):
            found |= os.sched_getaffinity(process)
    return len(found)


def leave_core_of(process: int, proc: Path = PROC) -> bool:
    """Move the calling thread to another core that it may use, if a process was last on this core.

    Returns
    -------
    bool
        Whether it was moved.
    """
    if _current_core is None:
        return False
    own = _current_core()
    with suppress(OSError):  # it has ended, or cores were just taken away
        # After the name of the program, which may contain spaces; see proc(5).
        fields = (proc / str(process) / "stat").read_bytes().rpartition(b")")[2].split()
        allowed = os.sched_getaffinity(0)
        if int(fields[_CORE]) == own and len(allowed) > 1:
            os.sched_setaffinity(0, allowed - {own})
            os.sched_setaffinity(0, allowed)
            return True
    return False


def use_cores(numbers: Set[int], proc: Path = PROC) -> None:
    """Let all threads of this process run on these cores."""
    for thread in (proc / "self" / "task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), numbers)


def cpu_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> Optional[float]:
    """Return the smallest processor quota set on this process, in cores, or None."""
    quotas = []
    for folder in control_groups("cpu", proc, cgroups):
        version_2 = _words(folder / "cpu.max")
        if len(version_2) == 2:
            quota, period = version_2
        else:
            quota, period = (
                (_words(folder / name) or ["max"])[0]
                for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            )
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def process_limit(folders: Optional[List[Path]] = None) -> Optional[int]:
    """Return how many processes and threads the control groups allow; None if there is no limit."""
    folders = control_groups("pids") if folders is None else folders
    limits = [_number(folder / "pids.max") for folder in folders]
    return min((limit for limit in limits if limit is not None), default=None)


def memory_room(folders: Optional[List[Path]] = None) -> Optional[int]:
    """Return how many more bytes the control groups allow; None if there is no limit.

    Cached files count as free, because the kernel drops them when memory is needed.
    """
    rooms = []
    for folder in control_groups("memory") if folders is None else folders:
        for limit_name, usage_name, cached_names in (
            ("memory.max", "memory.current", ("inactive_file", "active_file")),
            (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ("total_inactive_file", "total_active_file"),
            ),
        ):
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            # Version 1 writes "no limit" as nearly 2**63.
            if limit is not None and limit < 2**60:
                words = _words(folder / "memory.stat")
                cached = sum(int(words[words.index(name) + 1]) for name in cached_names if name in words)
                rooms.append(min(limit, max(0, limit - (usage or 0) + cached)))
    return min(rooms, default=None)


def control_groups(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> List[Path]:
    """List the folders of this process's control group and of all enclosing groups.

    A limit may be set at any level. Inside a container, the path that the kernel reports may not be
    mounted. So folders that do not exist are omitted, and the mount itself is always included.
    """
    folders = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = cgroups
        elif controller in controllers.split(","):
            mount = cgroups / controller
        else:
            continue
        group = mount / path.lstrip("/")
        while group != mount and mount in group.parents:
            folders.append(group)
            group = group.parent
        folders.append(mount)
    return [folder for folder in folders if folder.is_dir()]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
    except OSError as error:
        reraise_if_handlers(error)
        return ""


def _words(path: Path) -> List[str]:
    return _text(path).split()


def _number(path: Path) -> Optional[int]:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # such as "max"


# Other programs


class OtherPrograms:
    """The cores that processes other than this one and its children use, from now on.

    Virtual machines that use cores of the host (*steal*) are others, too.
    """

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy(), _own()

    @property
    def seconds(self) -> float:
        """The time since the beginning."""
        return time.monotonic() - self._began

    def own_cores(self) -> float:
        """Return how many cores this process and its children have used, on average."""
        return (_own() - self._own) / self.seconds

    def cores(self) -> float:
        """Return how many of the cores that this process may use the others have used, on average."""
        used = (_busy() - self._busy) - (_own() - self._own)
        return min(max(used / self.seconds, 0.0), float(affinity()))


def _busy() -> float:
    """Return the seconds for which the cores of this process have computed anything."""
    import psutil  # takes 6 ms, so not at import

    by_core = psutil.cpu_times(percpu=True)
    with suppress(IndexError):  # a container that shows fewer cores
        by_core = [by_core[number] for number in sorted(os.sched_getaffinity(0))]
    # Times of guests are part of the times of users; see proc(5).
    return sum(sum(item) - item.idle - item.iowait - item.guest - item.guest_nice for item in by_core)


def _own() -> float:
    """Return the seconds for which this process and its children, also ended ones, have computed."""
    import psutil

    this, seconds = psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:4])  # user, system, and those of its ended children
    return seconds
