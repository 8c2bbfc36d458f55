"""Telling the exceptions of a signal handler from the errors of the work that it has interrupted.

A handler written in Python may raise an exception after any call and at the start of any function: for
the code around it, the exception comes from there. ``TimeoutError``, which handlers of alarms often
raise, is an ``OSError``. So code that expects errors must not take the exception of a handler for such
an error. It is recognized by its traceback: Python calls a handler with the number of the signal and the
frame that it has interrupted.
"""

from __future__ import annotations

import gc
import inspect
import sys

# The functions of `signal` convert to and from enumerations, which takes 80 microseconds here.
from _signal import getsignal, valid_signals
from types import FrameType, TracebackType
from typing import Any, Iterable

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_below(frame: FrameType | None, caller: FrameType | None) -> bool:
    """Whether a frame is `caller`, or was called below it; False if `caller` is None."""
    while frame is not None and frame is not caller:
        frame = frame.f_back
    return frame is not None


def stacks() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, as ``sys._current_frames`` does.

    That holds a lock while it allocates. Up to Python 3.11.4, garbage may be collected there, and a
    finalizer that starts a thread or asks for the frames, too, waits for the lock forever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def may_be_running(caller: FrameType | None, tops: Iterable[FrameType]) -> bool:
    """Whether a frame is on the stack of a thread, given the innermost frames of threads.

    A thread may go on while its stack is followed. The frame of a generator that it has left meanwhile
    has no caller any more, so the rest of the stack is not known. Then the answer is True.
    """
    for top in tops:
        frame: FrameType | None = top
        last = top
        while frame is not None and frame is not caller:
            last, frame = frame, frame.f_back
        if frame is not None or last.f_code.co_flags & _GENERATORS:
            return True
    return False


def reraise_if_handlers(error: BaseException) -> None:
    """Raise the exception of a signal handler, if that is this exception or has led to it.

    Call it first in an ``except`` block that does not raise the same exception again.

    Parameters
    ----------
    error : BaseException
        The exception of the ``except`` block.
    """
    own = sys._getframe(1)
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        traceback = found.__traceback__
        if found is not error and traceback is not None and is_below(own, traceback.tb_frame):
            return  # it was being handled before the work of the block began
        if is_of_handler(traceback):
            try:
                raise found
            finally:
                del error, found, traceback, own  # which the traceback would keep
        seen.add(id(found))
        found = found.__cause__ or found.__context__


def is_of_handler(traceback: TracebackType | None) -> bool:
    """Whether one of the functions in a traceback was called as a signal handler."""
    handlers = _codes_of_handlers()
    # Not the first function, which has the exception: to look at its variables would make a reference
    # cycle.
    traceback = traceback and traceback.tb_next
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:  # its arguments may have other values by now
            return True
        arguments = _arguments(traceback.tb_frame)
        for number, frame in zip(arguments, arguments[1:]):
            if isinstance(number, int) and isinstance(frame, FrameType):
                return True
        traceback = traceback.tb_next
    return False


def _codes_of_handlers() -> set[Any]:
    """Return the code of the handlers that are functions or methods."""
    handlers = [getsignal(valid_signal) for valid_signal in valid_signals()]
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers}
    return codes - {None}


def _arguments(frame: FrameType) -> list[Any]:
    """Return the positional arguments of a function."""
    found = inspect.getargvalues(frame)
    further = found.locals.get(found.varargs) if found.varargs else ()
    return [found.locals.get(name) for name in found.args] + list(further or ())


class suppress:
    """Like ``contextlib.suppress``, but exceptions of a signal handler are raised.

    Parameters
    ----------
    *kinds : type
        The classes of the exceptions to suppress.
    """

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None or not isinstance(error, self._kinds):
            return False
        if is_of_handler(traceback):
            return False
        reraise_if_handlers(error)
        return True
