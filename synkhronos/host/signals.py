"""Ctrl-C and other signals at moments when their handlers must not run.

A Python signal handler runs between any two steps of the main thread, and the usual one raises an
exception there. Between a start and a finish barrier this would leave the ranks out of step; in the
middle of a fork, a worker that nobody knows of. At these moments a signal is deferred.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading

# Those of the module `signal` convert to and from enumerations, which takes 2 microseconds more.
from _signal import getsignal
from _signal import signal as set_handler
from threading import get_ident
from typing import Any, Callable, Iterator

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_log = logging.getLogger("synkhronos")


class DeferredSignal:
    """A context manager: a signal that comes inside is deferred; its handler is called at the exit.

    The handler is called at once for a second signal. Further ones are dropped, so that what cleans up
    after the second can do so.

    Only the main thread runs signal handlers: in other threads nothing is deferred. A signal without a
    handler written in Python is left alone.

    Parameters
    ----------
    number : int
        The signal's.
    """

    def __init__(self, number: int) -> None:
        self._number = int(number)  # an enumeration is slow to look up
        self._depth = 0
        self._handler: Callable[..., Any] | None = None
        self._received = 0
        self._frame: Any = None  # the frame that the first one interrupted
        self._announced = False
        self._main_thread = threading.main_thread().ident

    # Each command enters and exits, so these two are short.

    def __enter__(self) -> DeferredSignal:
        if get_ident() == self._main_thread:
            if not self._depth:
                self._received = 0
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
                set_handler(self._number, self._handler)  # one that has just come is still deferred
                if self._received == 1:
                    self._received, frame, self._frame = 0, self._frame, None
                    self._handler(self._number, frame)

    def _handle(self, number, frame):
        if not self._received:
            self._received, self._frame, self._announced = 1, frame, False
        elif self._received == 1 and frame.f_code not in _STEPS:
            self._received, self._frame = 2, None
            self._handler(number, frame)

    def announce(self) -> None:
        """Log, once, that a signal has come and is deferred."""
        if self._received == 1 and not self._announced:
            self._announced = True
            _log.warning(
                "%s: the processes finish their command first; a second one ends them at once",
                signal.Signals(self._number).name,
            )


#: An exception here would leave the block half entered or half left, so the second is deferred too.
_STEPS = (DeferredSignal.__enter__.__code__, DeferredSignal.__exit__.__code__)


@contextlib.contextmanager
def defer_termination() -> Iterator[None]:
    """Defer each of the signals that end a script."""
    with DeferredSignal(signal.SIGINT), DeferredSignal(signal.SIGTERM), DeferredSignal(signal.SIGHUP):
        yield


def ignore_signals_for_the_master() -> None:
    """In a worker: ignore the signals that the master answers.

    A terminal sends Ctrl-C and its hang-up to every process of the script; a batch system may send
    any signal to all of them. A handler of the script's is meant for the master.
    """
    for number in signal.valid_signals():
        if number == signal.SIGCHLD:
            continue
        if number in (signal.SIGINT, signal.SIGHUP) or callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    if callable(signal.getsignal(signal.SIGCHLD)):  # ignored, it would hide how children end
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
