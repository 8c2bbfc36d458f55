"""The signals that ``launch`` gets while jobs run, one after another, and what each means for a job."""

import contextlib
import signal
import subprocess
from typing import Iterator, Optional, Set

from synkhronos.host import job

#: The signal that stands for Ctrl-C between mpirun and the script; mpirun passes on no SIGINT.
INTERRUPT = signal.Signals[job.INTERRUPT]

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
    """

    def __init__(self) -> None:
        self.ended_by, self.interrupted = 0, False
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
        self.interrupted = self.interrupted or number == signal.SIGINT
        process = self._process
        if number in _ENDING:
            self.ended_by = self.ended_by or number
            process.terminate()  # type: ignore[union-attr]  # there are handlers since it was started
        else:
            process.send_signal(  # type: ignore[union-attr]
                INTERRUPT if number == signal.SIGINT else number
            )
