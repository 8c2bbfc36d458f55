"""A thread that acts some time after a signal, also while the main thread cannot run a handler."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Callable


class SignalThread:
    """A thread that calls a function after a signal, even if the main thread never returns from a call.

    Handlers written in Python run in the main thread, between two steps of Python. They have to wait
    while a function written in C does not return. The process must have a handler in Python for the
    signal, and no other use for ``signal.set_wakeup_fd``.

    Parameters
    ----------
    number : int
        The number of the signal.
    seconds : float
        From the signal until the call.
    call : callable
    """

    def __init__(self, number: int, seconds: float, call: Callable[[], None]) -> None:
        self._number, self._seconds, self._call = number, seconds, call
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._former = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._run, args=[reader], daemon=True).start()

    def _run(self, reader):
        with open(reader, "rb", buffering=0) as numbers:
            while arrived := numbers.read(1):
                if arrived[0] == self._number:
                    time.sleep(self._seconds)
                    self._call()

    def close(self) -> None:
        """Let the thread end, after the signals that have arrived."""
        signal.set_wakeup_fd(self._former)
        os.close(self._writer)
