"""The process of the script in a job, and its parent, which is the task that mpirun has started.

mpirun sends signals to all processes of a task, and does not return the exit code of a script that ends
without MPI. Here the parent passes the signals of ``launch`` to the script alone, as on one machine, and
writes for ``launch`` how the script has ended.
"""

import os
import signal
import sys
from typing import Any, Set

from synkhronos.host import job
from synkhronos.host.handler_errors import suppress
from synkhronos.host.signals import die_with_parent, do_nothing

#: What is written to stderr, with the name of a signal
ENDED = "python -m synkhronos: the script was ended by {}"
#: The same, only for ``launch``, with the exit code, and when SIGTERM is passed on
EXITED = "python -m synkhronos: the script has exited with {}"
TERMINATED = "python -m synkhronos: the script gets SIGTERM"

#: The signals that mpirun passes on, or sends when it ends the job, and what the script gets
_SIGNALS = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGHUP,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
    signal.Signals[job.INTERRUPT]: signal.SIGINT,
    signal.Signals[job.TERMINATE]: signal.SIGTERM,
}


def go_on_in_child(is_launched: bool) -> None:
    """Return in a child process. This process waits for it, and exits as a shell would.

    Parameters
    ----------
    is_launched : bool
        Whether ``launch`` has started the job. Otherwise signals reach the script without this process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        die_with_parent()
        if is_launched:
            os.setsid()
        return
    received: Set[int] = set()
    passed: Set[int] = set()

    def pass_on(number: int, frame: Any) -> None:
        received.add(number)
        wanted = _SIGNALS[signal.Signals(number)]
        if wanted == signal.SIGTERM and wanted in passed:
            return  # mpirun sends it, too, when ``launch`` ends the job for good
        passed.add(wanted)
        with suppress(ProcessLookupError):
            os.kill(child, wanted)
        if number == signal.Signals[job.TERMINATE]:
            _write(TERMINATED)

    for number in _SIGNALS:
        signal.signal(number, pass_on if is_launched else do_nothing)
    status = os.waitpid(child, 0)[1]
    is_signal = os.WIFSIGNALED(status)
    code = os.WTERMSIG(status) if is_signal else os.WEXITSTATUS(status)
    if signal.SIGTERM not in received:  # otherwise mpirun has ended the job
        if is_signal:
            _write(ENDED.format(signal.Signals(code).name))
        elif is_launched:
            _write(EXITED.format(code))
    os._exit(128 * is_signal + code)


def open_input(given: str) -> None:
    """Open the standard input of ``launch``, which it has described, as that of this process.

    It is empty if it cannot be opened, because ``launch`` runs on another machine, for instance.
    """
    path, *expected = given.rsplit(":", 2)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOCTTY)
        facts = os.fstat(descriptor)
    except OSError:
        facts = None
    if facts is None or [str(facts.st_dev), str(facts.st_ino)] != expected:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    if descriptor != 0:  # as it is where there was no standard input
        os.dup2(descriptor, 0)
        os.close(descriptor)


def _write(line: str) -> None:
    with suppress(OSError):  # nobody reads it
        os.write(2, f"{line}\n".encode())
