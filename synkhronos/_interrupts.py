"""Ctrl-C and other signals at moments when they must wait.

A Python signal handler runs between any two steps of the main thread, and the usual one raises there.
Between a start and a finish barrier this would leave the ranks out of step; in the middle of a fork, a
worker that nobody knows. So at these moments a signal waits until they are over.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading

# Those of the module `signal` make enumerations of what they take and return: 2 microseconds more.
from _signal import getsignal
from _signal import signal as set_handler
from threading import get_ident
from typing import Any, Callable, Iterator

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_log = logging.getLogger("synkhronos")


class Hold:
    """While it is entered, a signal waits; its handler is called as the hold ends.

    A second one gets through at once. More than that are forgotten, so that what cleans up after the
    second can do so.

    Only the main thread runs signal handlers: in other threads there is nothing to hold. A signal
    without a handler written in Python is left alone.

    Parameters
    ----------
    number : int
        The signal's.
    """

    def __init__(self, number: int) -> None:
        self._number = int(number)  # an enumeration is slow to look up
        self._depth = 0
        self._handler: Callable[..., Any] | None = None
        self._seen = 0
        self._frame: Any = None  # where the first one came
        self._reminded = False
        self._main_thread = threading.main_thread().ident

    # Each command passes here, so these two are short.

    def __enter__(self) -> Hold:
        if get_ident() == self._main_thread:
            if not self._depth:
                self._seen = 0
                handler = getsignal(self._number)
                self._handler = handler if callable(handler) else None
                if self._handler is not None:
                    set_handler(self._number, self._handle)  # raises for one that has just come
            self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        if get_ident() == self._main_thread:
            self._depth -= 1
            if not self._depth and self._handler is not None:
                set_handler(self._number, self._handler)  # one that has just come is still held
                if self._seen == 1:
                    self._seen, frame, self._frame = 0, self._frame, None
                    self._handler(self._number, frame)

    def _handle(self, number, frame):
        if not self._seen:
            self._seen, self._frame, self._reminded = 1, frame, False
        elif self._seen == 1 and frame.f_code not in _STEPS:
            self._seen, self._frame = 2, None
            self._handler(number, frame)

    def remind(self) -> None:
        """Say, once, that a signal has come and waits."""
        if self._seen == 1 and not self._reminded:
            self._reminded = True
            _log.warning(
                "%s: the processes finish their command first; once more ends them at once",
                signal.Signals(self._number).name,
            )


#: Here an exception would leave the hold half entered or half left, so the second waits with the first.
_STEPS = (Hold.__enter__.__code__, Hold.__exit__.__code__)


@contextlib.contextmanager
def hold_ending() -> Iterator[None]:
    """Hold each of the signals that end a script."""
    with Hold(signal.SIGINT), Hold(signal.SIGTERM), Hold(signal.SIGHUP):
        yield


def leave_to_master() -> None:
    """In a worker: ignore the signals that are for the master to answer.

    A terminal sends Ctrl-C and its hang-up to every process of the script; a batch system may send
    any signal so. Where the script has a handler, that is meant for the master.
    """
    for number in signal.valid_signals():
        if number == signal.SIGCHLD:
            continue
        if number in (signal.SIGINT, signal.SIGHUP) or callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    if callable(signal.getsignal(signal.SIGCHLD)):  # ignored, it would hide how children end
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
