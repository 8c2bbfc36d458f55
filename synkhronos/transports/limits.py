"""Explanations of errors of the operating system: which limit was reached, and how to raise it."""

import errno
import multiprocessing
import os
import resource

from synkhronos._errors import SynkhronosError
from synkhronos.host.machine import process_limit


def check_may_have_children() -> None:
    """Raise if multiprocessing forbids this process to have children."""
    if multiprocessing.current_process().daemon:
        raise SynkhronosError(
            "fork(): this process is itself a daemonic worker of multiprocessing, which may not "
            "have children; call fork() in the main process, or start this process with daemon=False"
        )


def too_many_workers(error: OSError, started: int, wanted: int) -> SynkhronosError:
    """Explain why not all workers could be started. Those that were started have been ended."""
    remedies = {
        errno.EAGAIN: f"too many processes or threads: {_process_limits()}; raise the limit with "
        f"'ulimit -u', or that of the container ('docker run --pids-limit')",
        errno.ENOMEM: "too little memory to fork this process: free some, or allow overcommit "
        "(sysctl vm.overcommit_memory=0)",
        errno.EMFILE: f"each worker takes 2 file descriptors; {_open_files()}",
        errno.ENFILE: "the machine has too many open files: raise it with sysctl fs.file-max",
    }
    return SynkhronosError(
        f"only {started} of {wanted} workers could be started, and were ended again ({error}): "
        f"{remedies.get(error.errno, 'see the message of the system')}; or call close() and fork() "
        f"with fewer processes"
    )


def too_many_files(error: OSError) -> SynkhronosError:
    """Explain why a file with limits of this machine could not be read."""
    remedy = "it is needed to find out the limits of this machine"
    if error.errno == errno.EMFILE:
        remedy = _open_files()
    return SynkhronosError(f"fork(): a file could not be read ({error}): {remedy}")


def _open_files():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        is_open = len(os.listdir("/proc/self/fd"))
    except OSError:  # no descriptor is free to list the folder
        is_open = limit
    return f"{is_open} of at most {limit} files are open in this process; raise it with 'ulimit -n'"


def _process_limits():
    of_user, of_group = resource.getrlimit(resource.RLIMIT_NPROC)[0], process_limit()
    return (
        f"this user may have {'any number' if of_user < 0 else of_user} of them, this control group "
        f"{'any number' if of_group is None else of_group}"
    )
