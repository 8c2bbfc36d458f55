"""The signals that ``launch`` gets while jobs run, one after another, and what each means for a job."""

import contextlib
import signal
import subprocess
import threading
from typing import Any, Iterator, Optional, Set

from synkhronos.host import job

#: The signals that stand for SIGINT and SIGTERM, which mpirun does not pass on, between it and a script
INTERRUPT, TERMINATE = signal.Signals[job.INTERRUPT], signal.Signals[job.TERMINATE]

_ANSWER = 5.0  # seconds for the parent of the script to pass SIGTERM on, if it has started
_PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class SignalsOfUser:
    """The handlers of this process's signals, which it passes on to an ``mpirun``.

    A signal that is ignored stays ignored.

    Attributes
    ----------
    ended_by : int
        The signal that ends the job; 0 if there was none.
    interrupted : bool
        Whether there was a SIGINT.
    is_passed_on : bool
        Whether the script has got SIGTERM.
    """

    def __init__(self) -> None:
        self.ended_by, self.interrupted, self.is_passed_on = 0, False, False
        self._numbers = {one for one in _PASSED if signal.getsignal(one) != signal.SIG_IGN}
        self._process: Optional[subprocess.Popen[bytes]] = None

    @property
    def code(self) -> int:
        """The exit code for a signal that has come while no job ran; 0 if there was none."""
        number = self.ended_by or (signal.SIGINT if self.interrupted else 0)
        return 128 + number if number else 0

    @contextlib.contextmanager
    def deferred(self) -> Iterator[Set[int]]:
        """Let signals wait until the end of the block. Return those that waited before it."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        try:
            yield mask
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def pass_to(self, process: "subprocess.Popen[bytes]") -> None:
        """Pass signals on to this process from now on."""
        self._process = process
        for one in self._numbers:
            signal.signal(one, self._handle)
        if self.code:  # between two jobs
            process.terminate()

    def _handle(self, number: int, frame: object) -> None:
        process: Any = self._process  # there are handlers since it was started
        if number == signal.SIGINT:
            self.interrupted = True
            process.send_signal(INTERRUPT)
        elif number not in _ENDING:
            process.send_signal(number)
        elif self.ended_by:
            process.terminate()  # it ends the job soon
        else:
            self.ended_by = number
            process.send_signal(TERMINATE)
            timer = threading.Timer(_ANSWER, self._terminate_unless_passed_on)
            timer.daemon = True
            timer.start()

    def _terminate_unless_passed_on(self) -> None:
        if not self.is_passed_on:
            self._process.terminate()  # type: ignore[union-attr]
