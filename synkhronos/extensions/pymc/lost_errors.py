"""Errors of evaluations whose callers lose them: they are raised in the main thread, too.

nutpie evaluates a model in threads of its own, by a function of Numba that reports every error as a
divergence. The script would get draws of chains that stand still. So an error in a thread that was not
started by Python is also raised where the script waits. A sampler that waits outside of Python looks for
signals only: nutpie ends its chains after ``KeyboardInterrupt``, and waits for them, so for the thread
with the error. Only then the error is set as the main thread's asynchronous exception, which needs a
class. An earlier exception would come before the chains are ended.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
import threading
import time
from typing import Any

from synkhronos import SynkhronosError
from synkhronos.host.handler_errors import stacks

_logger = logging.getLogger("synkhronos")

_INTERRUPTED_WITHIN = 5.0  # seconds until the main thread must have handled its interruption
_LOOK = 0.01
#: Classes whose instances are like others of the same arguments and attributes; or they are subclasses.
_PLAIN = (ValueError, TypeError, IndexError, RuntimeError, MemoryError, AssertionError)


class LostErrors:
    """The errors of the evaluations of one sum that would be lost.

    Each is raised once, although a sampler goes on to evaluate until it is stopped: an error in a thread
    that had evaluated before an earlier error is a consequence of it.

    Parameters
    ----------
    name : str
        The name of the sum in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: set[int] = set()  # the system's numbers of threads that have evaluated
        self._told: set[int] = set()  # those that had when an error was raised
        self._lock = threading.Lock()

    def note_thread(self) -> None:
        """Note that this thread evaluates the sum."""
        self._threads.add(threading.get_native_id())

    def report(self, error: Exception) -> None:
        """Raise an error of this thread in the main thread if it would be lost here."""
        if not _would_be_lost():
            return
        with self._lock:  # another thread that fails now has noted itself when this one is done
            if threading.get_native_id() in self._told:
                return
            log(
                logging.ERROR,
                f"{self._name}: an evaluation failed in a thread of the sampler: {error}",
            )
            raise_in_main_thread(error)
            self._told |= self._threads


def raise_in_main_thread(error: Exception) -> None:
    """Interrupt the main thread, and raise an exception like this one there."""
    main = threading.main_thread().ident or 0
    if callable(signal.getsignal(signal.SIGINT)):
        before = _place_of(main)
        signal.pthread_kill(main, signal.SIGINT)
        end = time.monotonic() + _INTERRUPTED_WITHIN
        while _place_of(main) == before and time.monotonic() < end:
            time.sleep(_LOOK)
        time.sleep(2 * _LOOK)  # so that it waits again
    kind = ctypes.py_object(_class_for(error))
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), kind)


def _place_of(thread: int) -> tuple[int, int]:
    frame = stacks().get(thread)
    return (id(frame), frame.f_lasti) if frame else (0, 0)


def log(level: int, message: str) -> None:
    """Log a message from any thread."""
    # In a thread of Python's, since logging would enter this one among those for good.
    threading.Thread(target=_logger.log, args=(level, message), daemon=True).start()


def _class_for(error: Exception) -> type[Exception]:
    """Return a class whose instances, made without arguments, are like an exception."""
    kind = (
        type(error) if isinstance(error, SynkhronosError) or type(error) in _PLAIN else SynkhronosError
    )
    arguments = error.args if kind is type(error) else (str(error),)

    def init(self: Any) -> None:
        self.args = arguments
        self.__dict__.update(vars(error))
        self.__cause__ = error

    names = {"__init__": init, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)


def _would_be_lost() -> bool:
    """Whether nothing in Python has called this thread's function, or could get its errors."""
    if threading.get_ident() == threading.main_thread().ident:
        return False
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") != "threading"
