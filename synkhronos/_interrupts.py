"""Ctrl-C and other signals at moments when they must wait.

A Python signal handler runs between any two steps of the main thread, and the usual one raises there.
Between a start and a finish barrier this would leave the ranks out of step; in the middle of a fork, a
worker that nobody knows. So at these moments a signal waits until they are over.
"""

from __future__ import annotations

import logging
import signal
import threading

# Those of the module `signal` make enumerations of what they take and return: 2 microseconds more.
from _signal import getsignal
from _signal import signal as set_handler
from threading import get_ident
from typing import Any, Callable

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_log = logging.getLogger("synkhronos")


class Hold:
    """While it is entered, a signal waits; its handler is called as the hold ends.

    A second signal gets through at once. More than that are forgotten, so that what cleans up after
    the second can do so.

    Only the main thread runs signal handlers: in other threads there is nothing to hold. Signals without
    a handler written in Python are left alone.

    Parameters
    ----------
    *signals : int
    """

    def __init__(self, *signals: int) -> None:
        self._signals = tuple(map(int, signals))  # an enumeration is slow to look up
        self._depth = 0
        self._handlers: dict[int, Callable[..., Any]] = {}
        self._waiting: tuple[Callable[..., Any], int, Any] | None = None
        self._seen = 0
        self._reminded = False
        self._main_thread = threading.main_thread().ident

    def __enter__(self) -> Hold:
        if get_ident() == self._main_thread:
            if not self._depth:
                self._begin()
            self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        if get_ident() == self._main_thread:
            self._depth -= 1
            if not self._depth:
                self._restore()
                if self._waiting is not None:
                    (handler, *arguments), self._waiting = self._waiting, None
                    handler(*arguments)

    def _begin(self):
        self._seen, self._waiting, self._reminded = 0, None, False
        try:
            for number in self._signals:
                handler = getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    set_handler(number, self._handle)
        except BaseException:  # from the handler of a signal that had just come
            self._restore()
            raise

    def _restore(self):
        handlers = self._handlers
        try:
            for number in self._signals:
                if number in handlers:
                    set_handler(number, handlers[number])  # one that has just come is still held
                    del handlers[number]
        finally:
            if handlers:  # the handler of one raised, before the others were restored
                self._restore()

    def _handle(self, number, frame):
        self._seen += 1
        if self._seen == 1:
            self._waiting = self._handlers[number], number, frame
        elif self._seen == 2:
            self._waiting = None
            self._handlers[number](number, frame)

    def remind(self) -> None:
        """Say, once, that a signal has come and waits."""
        if self._waiting is not None and not self._reminded:
            self._reminded = True
            _log.warning(
                "%s: the processes finish their command first; once more ends them at once",
                signal.Signals(self._waiting[1]).name,
            )


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
