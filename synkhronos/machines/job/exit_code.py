"""Running a script in a child process, so that a signal that ends it becomes an exit code.

With ULFM, OpenMPI's mpirun goes on when a signal ends a task, even the one with the script, and returns
0. So this says that the script was ended, which ``launch`` reads, and exits with a code.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
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
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    for number in _PASSED_BY:
        signal.signal(number, _ignore)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    sys.stderr.write(ENDED.format(signal.Signals(number).name) + "\n")
    sys.stderr.flush()
    os._exit(128 + number)


def _ignore(number, frame):
    """Do nothing. Unlike `signal.SIG_IGN`, a child that is forked later would not inherit it."""
