"""Explanations of errors of the operating system: which limit was reached, and how to raise it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import sys
from pathlib import Path

from synkhronos._errors import REMEDY, SynkhronosError
from synkhronos.host.handler_errors import reraise_if_handlers, suppress
from synkhronos.host.machine import cores, process_limit
from synkhronos.stores.memory import RESERVED, most_ranks


def check_may_have_children() -> None:
    """Raise if multiprocessing forbids this process to have children."""
    if multiprocessing.current_process().daemon:
        raise SynkhronosError(
            "fork(): this process is itself a daemonic worker of multiprocessing, which may not "
            "have children; call fork() in the main process, or start this process with daemon=False"
        )


def check_size(size: int) -> None:
    """Raise if this machine cannot have a world of this size, before any part of it is created."""
    if size == 1:
        return
    most, reason = min(
        (_most_by_files(), f"each worker takes 2 file descriptors; {_open_files()}"),
        (_most_by_processes(), f"processes and threads are limited: {_process_limits()}"),
        (most_ranks(), f"{RESERVED >> 20} MB of shared memory are reserved for each"),
    )
    if size > most:
        raise SynkhronosError(
            f"fork(): {size} processes are more than the {most} that this machine allows: {reason}. By "
            f"default there is one for each core, here {cores()}"
        )


def _most_by_files() -> int:
    is_open, limit = _files()
    return 1 + max(0, limit - is_open) // 2


def _most_by_processes() -> int:
    of_user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    found = [process_limit(), None if of_user < 0 or os.geteuid() == 0 else of_user]
    with suppress(OSError):
        found.append(int(Path("/proc/sys/kernel/pid_max").read_text()))
    return min((item for item in found if item is not None), default=sys.maxsize)


def too_many_workers(error: OSError, started: int, wanted: int) -> SynkhronosError:
    """Explain why not all workers could be started. Those that were started have been ended."""
    return SynkhronosError(
        f"only {started} of {wanted} workers could be started, and were ended again ({error}): "
        f"{_remedy(error)}; or call close() and fork() with fewer processes"
    )


def too_many_background_processes(
    error: OSError, name: str, started: int, wanted: int
) -> SynkhronosError:
    """Explain why not all background processes could be started. Those that were have been ended."""
    return SynkhronosError(
        f"{name}: only {started} of {wanted} processes could be started, and were ended again "
        f"({error}): {_remedy(error)}; or use fewer processes"
    )


def _remedy(error: OSError) -> str:
    """Return what to do if a process cannot be started."""
    reraise_if_handlers(error)
    remedies: dict[int | None, str] = {
        errno.EAGAIN: f"too many processes or threads: {_process_limits()}",
        errno.ENOMEM: "too little memory to fork this process: free some, or allow overcommit "
        "(sysctl vm.overcommit_memory=0)",
        errno.EMFILE: f"each process takes 2 file descriptors; {_open_files()}",
        errno.ENFILE: "the machine has too many open files: raise it with sysctl fs.file-max",
    }
    return remedies.get(error.errno, "see the message of the system")


def too_many_files(error: OSError) -> SynkhronosError:
    """Explain why a file with limits of this machine could not be read."""
    reraise_if_handlers(error)
    remedy = "it is needed to find out the limits of this machine"
    if error.errno == errno.EMFILE:
        remedy = _open_files()
    return SynkhronosError(f"fork(): a file could not be read ({error}): {remedy}")


def _files() -> tuple[int, int]:
    """Return how many files are open in this process, and how many may be."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        return len(os.listdir("/proc/self/fd")), limit
    except OSError as error:  # no descriptor is free to list the folder
        reraise_if_handlers(error)
        return limit, limit


def _open_files() -> str:
    is_open, limit = _files()
    return f"{is_open} of at most {limit} files are open in this process; raise it with 'ulimit -n'"


def _process_limits() -> str:
    of_user, of_group = resource.getrlimit(resource.RLIMIT_NPROC)[0], process_limit()
    return (
        f"this user may have {'any number' if of_user < 0 else of_user} of them, this control group "
        f"{'any number' if of_group is None else of_group}; raise the limit with 'ulimit -u', or "
        f"the container's limit ('docker run --pids-limit')"
    )


def not_started(rank: int, seconds: float) -> str:
    """Return why a world is broken if a worker did not start within some time."""
    return (
        f"rank {rank} has not started within {seconds:g} seconds; it may wait for a lock that another "
        f"thread of the script held when it was forked; {REMEDY}"
    )
