"""Whether a job has ended because a machine or a task was lost, according to what mpirun has written.

This is on stderr, where the messages of mpirun are among those of the tasks; one of OpenMPI 5 is on
stdout. There is no other source: mpirun returns the same codes when the script ends by itself.
"""

import re
import signal
from typing import Optional

from synkhronos.machines.job.script_process import ENDED
from synkhronos.machines.job.start_guard import DIED

#: Signals by which users, and batch systems, end a script
OF_USERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

#: What OpenMPI 4's and 5's mpirun says when it has lost the daemon of a machine
DAEMON = "has lost communication with a remote daemon"
# The same if it waits for the start of a daemon, or if the daemon is killed on a machine that answers.
_DAEMONS = re.compile(
    f"(?:ORTE|PRTE) (?:{DAEMON}|daemon has unexpectedly failed after launch"
    "|was unable to reliably start one or more daemons)"
)
# OpenMPI 5 writes this to stdout.
_UNSTARTED = re.compile(r"^A daemon failed to report back after being spawned", re.MULTILINE)
_REMOTE_HOST = re.compile(r"Remote host: +(\S+)")
_REMOTE = re.compile(r"Remote daemon: \S+ on node (\S+)")
# From a progress process, behind the name of its machine if that is not the first one
_MACHINE = re.compile(
    r"^[\0 ]*(?:\[[^]\n]*\] )?(machine \S+ \(ranks? [\d, ]+\) was lost: .*)$", re.MULTILINE
)
_TASK = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)")
_STARTING = re.compile(DIED.format(r"\S+"))
# Of OpenMPI 4's mpirun, which then says more, but in a few runs has not
_ABORTED_JOB = "Per user-direction, the job has been aborted."
_MORE = ("mpirun noticed", "mpirun detected")
#: What the parent of the script says, with the name of the signal
SCRIPT = re.compile(ENDED.format(r"(SIG[A-Z0-9]+)"))
# The last line of a traceback. A rank that has exited by itself is no loss.
_ERROR = re.compile(r"^synkhronos\.[\w.]*(?:WorldBroken|Lost)Error: (.*)$", re.MULTILINE)
# How a job with ULFM ends if it cannot go on.
_ABORTED = re.compile("MPI_ABORT was invoked|Abort is in progress")
# By a task without the script: it aborts only if the task with the script, or a machine, was lost.
_ABORTED_BY = re.compile(r"MPI_ABORT was invoked on rank ([1-9]\d*) in communicator")
_LOST = re.compile(r"\(killed by SIG\w+\)|\bleft the job\b")
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):$", re.MULTILINE)


def cause_of_loss(
    said: str, survives_deaths: bool = False, code: int = 0, printed: str = ""
) -> Optional[str]:
    """Return what was lost, in one line; None if the script has ended the job, or a user.

    An uncaught `WorldBrokenError` counts if it says that a signal has ended a rank, or that a machine
    has left the job.

    Parameters
    ----------
    said : str
        What mpirun and the tasks have written to stderr, or the end of it.
    survives_deaths : bool
        Whether the job could go on, with ULFM, without tasks that had died.
    code : int
        The exit code of the job. That of a signal counts if mpirun has not said what has ended.
    printed : str
        What they have written to stdout.
    """
    task, script, starting = _TASK.search(said), SCRIPT.search(said), _STARTING.search(said)
    if starting and not (script and script.start() < starting.start()):
        return starting[0]  # the job was ended after that, and so the script
    if task and task[1] == "0" and int(task[3]) in OF_USERS:
        return None
    if script and signal.Signals[script[1]] in OF_USERS:
        return None
    machine = _MACHINE.search(said)
    if machine and (not survives_deaths or _ABORTED.search(said)):
        return machine[1]
    if _DAEMONS.search(said):
        remote = _REMOTE.search(said)
        return f"mpirun has lost the machine {remote[1]}" if remote else "mpirun has lost a machine"
    if _UNSTARTED.search(printed):
        remote = _REMOTE_HOST.search(printed)
        return f"mpirun has lost {remote[1] if remote else 'a machine'} at the start"
    if task:
        return f"task {task[1]}, on {task[2]}, was ended by {_name(int(task[3]))}"
    if script:
        return f"the script was ended by {script[1]}"
    aborted_by = _ABORTED_BY.search(said) if survives_deaths else None
    if aborted_by:
        return f"task {aborted_by[1]} has ended the job, as the task with the script was lost"
    if _ABORTED_JOB in said and not any(one in said for one in _MORE) and code > 128:
        return None if code - 128 in OF_USERS else f"a task was ended by {_name(code - 128)}"
    return _uncaught(said)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _uncaught(said: str) -> Optional[str]:
    """Return the message of the exception that has ended the script, if it is about a loss."""
    errors = list(_ERROR.finditer(said))
    if not errors or _TRACEBACK.search(said, errors[-1].end()) or not _LOST.search(errors[-1][1]):
        return None
    return errors[-1][1].partition(";")[0]
