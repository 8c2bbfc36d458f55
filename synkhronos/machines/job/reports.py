"""What the processes of a job tell ``launch``: lines of their own among those that they write to stderr.

mpirun passes on the stderr of all tasks, also where ``launch`` runs on a machine without any. What
mpirun itself writes is not looked at: it differs between versions.
"""

import os
import re
import signal
from typing import Optional

from synkhronos.host import job
from synkhronos.host.handler_errors import suppress

#: The beginning of each of these lines
BEGIN = "python -m synkhronos: "
#: Only for ``launch``: the script has started; it gets SIGTERM; it has exited, with a code; the error
#: that has ended it is about a loss, with a cause; a task has ended by an error, which is no loss
STARTED, TERMINATED = "the script has started", "the script gets SIGTERM"
EXITED, LOST, FAILED = "the script has exited with ", "the script has lost ", "a task has failed"
#: Also for users: a signal has ended the script, with its name; a task has died at its start
ENDED, DIED = "the script was ended by ", "before MPI was initialized, a task has died on "

# Also behind the name of another machine
_KINDS = "|".join((STARTED, TERMINATED, EXITED, LOST, FAILED))
_HIDDEN = re.compile(rf"(?:^\[[^]\n]*\] )?{BEGIN}(?:{_KINDS})[^\n]*\n".encode(), re.MULTILINE)
_LONGEST = 1 << 12  # bytes of an unfinished line that are remembered

#: Signals by which users, and batch systems, end a script
_OF_USERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def report(kind: str, detail: object = "") -> None:
    """Tell ``launch``. Only ``launch --restart`` wants to know of losses and failures."""
    if kind in (LOST, FAILED) and job.JOB not in os.environ:
        return
    with suppress(OSError):
        os.write(2, f"{BEGIN}{kind}{detail}\n".encode())


class Reports:
    """What was told in a job.

    Attributes
    ----------
    is_started : bool
        Whether the script has started.
    gets_sigterm : bool
        Whether SIGTERM was passed on to it.
    code : int or None
        The exit code of the script if it has ended by itself, as a shell would return it.
    machine : str
        The machine that is lost, and why, in words; empty if a progress process has named none.
    """

    def __init__(self) -> None:
        self.is_started = self.gets_sigterm = self._has_failed = False
        self.code: Optional[int] = None
        self._signal = 0  # that has ended the script
        self._lost_by_script = self._died = self.machine = ""
        self._rest = b""

    def read(self, data: bytes) -> bytes:
        """Read more of the stderr of a job; return what of it is for users."""
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace"))
        self._rest = rest[-_LONGEST:]
        return _HIDDEN.sub(b"", data)

    def _take(self, line: str) -> None:
        told = line.partition(BEGIN)[2]
        if told == STARTED:
            self.is_started = True
        elif told == TERMINATED:
            self.gets_sigterm = True
        elif told == FAILED:
            self._has_failed = True
        elif told.startswith(EXITED):
            self.code = int(told[len(EXITED) :])
        elif told.startswith(ENDED):
            self._signal = signal.Signals[told[len(ENDED) :]]
            self.code = 128 + self._signal
        elif told.startswith(LOST):
            self._lost_by_script = told[len(LOST) :]
        elif told.startswith(DIED) and self.code is None:  # else it was ended with the job
            self._died = told
        elif not told:  # of a progress process, behind the name of its machine
            _, is_found, lost = line.partition("machine ")
            if is_found and " was lost: " in lost and not self.machine:
                self.machine = f"machine {lost}"

    def cause_of_loss(self, code: int, survives_deaths: bool) -> Optional[str]:
        """Return which machine or task was lost, in one line; None if none was, as far as was told.

        Parameters
        ----------
        code : int
            The exit code of the job, which is not 0.
        survives_deaths : bool
            Whether the job could go on, with ULFM, without tasks that had died.
        """
        if self._died:
            return self._died
        number = code - 128 if self.code is None else self._signal
        if number in _OF_USERS and (self._signal or not self.machine):
            return None
        if self.machine and (self.code is None or not survives_deaths):
            return self.machine
        if self._lost_by_script or self._has_failed:
            return self._lost_by_script or None
        if number in signal.valid_signals():
            name = signal.Signals(number).name if number < signal.SIGRTMIN else f"signal {number}"
            return f"{'a task' if self.code is None else 'the script'} was ended by {name}"
        return "a machine or a task was lost" if self.is_started and self.code is None else None
