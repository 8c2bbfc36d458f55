"""Running a script in a child process, so that a signal that ends it becomes an exit code.

With ULFM, OpenMPI's mpirun goes on when a signal ends a task, even the one with the script, and returns
0. So this says that the script was ended, which ``launch`` reads, and exits with a code.
"""

import os
import signal
import sys

from synkhronos.host.signals import die_with_parent, do_nothing

#: What is written to stderr, with the name of the signal
ENDED = "python -m synkhronos: the script was ended by {}"

#: mpirun sends its signals to all processes of the task, so they reach the script without this one.
_PASSED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def go_on_in_child() -> None:
    """Return in a child process. This process waits for it, and exits as a shell would."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        die_with_parent()
        return
    for number in _PASSED_BY:
        signal.signal(number, do_nothing)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    ended_by = os.WTERMSIG(status)
    sys.stderr.write(ENDED.format(signal.Signals(ended_by).name) + "\n")
    sys.stderr.flush()
    os._exit(128 + ended_by)
