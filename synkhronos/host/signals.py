"""Deferring Ctrl-C and other signals while their handlers must not run.

A Python signal handler runs between any two steps of the main thread, and the default handler raises an
exception there. Between a start and a finish barrier, the ranks would get out of step; in the middle of
a fork, a worker would be left behind. In these places a signal is deferred.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading

# The functions of `signal` convert to and from enumerations, which takes 2 microseconds more.
from _signal import getsignal, valid_signals
from _signal import signal as set_handler
from sys import _getframe, modules
from threading import get_ident
from types import FrameType
from typing import Any, Callable, Collection, Iterator

from synkhronos.host.handler_errors import is_below

_PR_SET_PDEATHSIG = 1

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FROM_BATCH_SYSTEMS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)

_log = logging.getLogger("synkhronos")


class DeferredSignal:
    """A context manager that defers a signal: its handler is called at the exit.

    For a second signal, the handler is called immediately. Further signals are dropped, so that the
    cleanup after the second signal is not interrupted.

    Only the main thread runs signal handlers; in other threads nothing is deferred. A signal that has no
    handler written in Python is not changed.

    After the first block, its own handler remains installed until `remove` is called. Outside of the
    blocks it passes signals on. To set and restore handlers for each block would be a tenth of a short
    command. But it is removed after each block once asyncio or trio has been imported: they handle
    Ctrl-C themselves only if they find Python's own handler.

    Parameters
    ----------
    number : int
        The number of the signal.
    """

    def __init__(self, number: int) -> None:
        self._number = int(number)  # an enumeration is slow to look up
        self._depth = 0
        # The function with the outermost block. The handler of another signal may prevent the exit.
        self._block: FrameType | None = None
        self._received = 0
        self._installed: Any = None
        self._frame: Any = None  # the frame interrupted by the first signal
        self._announced = False
        self._on_first: Callable[[], None] | None = None  # called by the handler of the first signal
        self._main_thread = threading.main_thread().ident

    # Every command calls these two methods, so they are short.

    def __enter__(self) -> DeferredSignal:
        if get_ident() == self._main_thread:
            if not self._depth or not is_below(_getframe(1), self._block):
                self._depth = self._received = 0
                self._block = _getframe(1)
                if getsignal(self._number) is not self._installed:
                    self._install()
                self._depth = 1
            else:
                self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        if get_ident() == self._main_thread:
            self._depth -= 1
            if not self._depth:
                self._block = None
                if "asyncio" in modules or "trio" in modules:
                    self.remove()
                if self._received == 1:
                    self._received, frame, self._frame = 0, self._frame, None
                    self._installed.handler(self._number, frame)

    def _install(self) -> None:
        handler = getsignal(self._number)
        if callable(handler) and not (type(handler) is _Handler and handler.deferred is self):
            handler = _Handler(self, handler)
            set_handler(self._number, handler)  # raises for a new signal
        # Otherwise there is nothing to defer, or the script has restored a handler of before.
        self._installed = handler

    def remove(self) -> None:
        """Install the script's handler again, unless it has installed another handler meanwhile."""
        if get_ident() == self._main_thread and type(self._installed) is _Handler:
            if getsignal(self._number) is self._installed:
                set_handler(self._number, self._installed.handler)

    def _receive(self, number: int, frame: Any) -> None:
        if not self._received:
            self._received, self._frame, self._announced = 1, frame, False
            if self._on_first is not None:
                self._on_first()
        elif self._received == 1 and frame.f_code not in _STEPS:
            self._received, self._frame = 2, None
            self._installed.handler(number, frame)

    @contextlib.contextmanager
    def calling(self, on_first: Callable[[], None]) -> Iterator[None]:
        """Let ``on_first()`` be called for the first signal, which may have been deferred already."""
        self._on_first = on_first
        if self.is_pending:
            on_first()
        try:
            yield
        finally:
            self._on_first = None

    @property
    def is_pending(self) -> bool:
        """Whether a signal has been deferred."""
        return self._received == 1

    def drop(self) -> None:
        """Forget a signal that was deferred, unless the script has a handler of its own for it."""
        if self._received == 1 and self._installed.handler is signal.default_int_handler:
            self._received, self._frame = 0, None

    def announce(self) -> None:
        """Log, once, that a signal has been deferred."""
        if self._received == 1 and not self._announced:
            self._announced = True
            message = "%s: the processes finish their command first; a second one ends them at once"
            if self._on_first is not None:
                message = "%s: all ranks are asked to stop; a second one ends them at once"
            _log.warning(message, signal.Signals(self._number).name)


class _Handler:
    """Installed instead of the script's `handler`: inside a block, it defers the signal."""

    def __init__(self, deferred: DeferredSignal, handler: Callable[[int, Any], Any]) -> None:
        self.deferred, self.handler = deferred, handler

    def __call__(self, number: int, frame: Any) -> None:
        deferred = self.deferred
        # If it is not the last installed handler, the script's handler has called it.
        is_last = deferred._depth and deferred._installed is self
        if is_last and is_below(_getframe(1), deferred._block):
            deferred._receive(number, frame)
        else:
            self.handler(number, frame)


class DeferredSignals:
    """A context manager that defers every signal that has a handler written in Python, but SIGCHLD.

    The handlers are called at the exit. For a second signal of a kind, its handler is called at once;
    further signals are dropped. Like `DeferredSignal`, it acts in the main thread only.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}  # the script's
        self._received: dict[int, Any] = {}  # the frame that the first signal has interrupted
        self._defers = False  # otherwise signals are passed on

    def __enter__(self) -> None:
        if get_ident() == threading.main_thread().ident:
            try:
                for number in handled_signals():
                    if number != signal.SIGCHLD:  # a second child may end, and then a third one
                        self._handlers[number] = getsignal(number)
                        set_handler(number, self._receive)
                self._defers = True  # for all of them at once
            except BaseException:
                self._restore()
                raise

    def __exit__(self, *error: object) -> None:
        try:
            self._restore()
        finally:
            self._defers = False
            self._call([(number, frame) for number, frame in self._received.items() if frame])

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            if getsignal(number) == self._receive:
                set_handler(number, handler)

    def _call(self, received: list[tuple[int, Any]]) -> None:
        """Call the handlers of signals in this order, also if one of them raises an exception."""
        if received:
            (number, frame), *others = received
            try:
                self._handlers[number](number, frame)
            finally:
                self._call(others)

    def _receive(self, number: int, frame: Any) -> None:
        if self._defers and number not in self._received:
            self._received[number] = frame
        elif not self._defers or (self._received[number] and frame.f_code not in _STEPS):
            self._received[number] = None
            self._handlers[number](number, frame)


def handled_signals() -> list[int]:
    """Return the numbers of the signals that have a handler written in Python."""
    return [number for number in valid_signals() if callable(getsignal(number))]


#: An exception here would leave the block half entered or half exited; a second signal is deferred, too.
_STEPS = tuple(
    method.__code__
    for kind in (DeferredSignal, DeferredSignals)
    for method in (kind.__enter__, kind.__exit__)
) + (DeferredSignals._restore.__code__,)


def ignore_signals_for_the_master() -> None:
    """In a worker: ignore the signals that the master handles.

    A terminal sends Ctrl-C and hang-up to every process of the script. A batch system may send any
    signal to all of them. The script's handlers are meant for the master, also those that it sets later.
    """
    for number in signal.valid_signals():
        if number == signal.SIGCHLD:
            continue
        if number in (signal.SIGINT, signal.SIGHUP) or callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    if callable(signal.getsignal(signal.SIGCHLD)):  # ignoring it would hide how children end
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Unlike `signal.SIG_IGN`, a handler is not inherited by programs that are started.
    own = [
        number
        for number in _FROM_BATCH_SYSTEMS
        if number == signal.SIGTERM or signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in own:
        signal.signal(number, _end_unless_handled)
    _use_default_in_children(own)


def _end_unless_handled(number: int, frame: Any) -> None:
    """Handle a signal in a worker: end as by default, unless the master handles or ignores it."""
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/status") as file:
        masks = [line.split()[1] for line in file if line.startswith(("SigIgn:", "SigCgt:"))]
        if any(int(mask, 16) >> (number - 1) & 1 for mask in masks):
            return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def do_nothing(number: int, frame: Any) -> None:
    """Handle a signal. Unlike `signal.SIG_IGN`, this is not inherited by programs that are started."""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the thread that forked it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _use_default_in_children(numbers: Collection[int]) -> None:
    """Let signals end the processes that this worker forks, as by default.

    The signals are blocked meanwhile, so that none is lost before the child has its handlers.
    """
    masks: list[Any] = []

    def before() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, numbers))

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def after_in_child() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)
