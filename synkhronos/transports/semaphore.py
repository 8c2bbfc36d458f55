"""Semaphores without a name, in the memory that the ranks share.

A named one is a file in ``/dev/shm`` for the moment between its making and its unlinking, and stays
there if the process is killed in it. One in an anonymous mapping needs no file and no descriptor, and
ends with the last process that has the mapping.
"""

import ctypes
import errno
import os
import time
from functools import partial

_BYTES = 64  # more than sem_t has anywhere; a cache line of its own
_POINTER = ctypes.c_void_p


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _function(name, library, *arguments):
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function


# What never waits keeps the interpreter's lock: that is faster.
_AT_ONCE = ctypes.PyDLL(None)
_WAITING = ctypes.CDLL(None, use_errno=True)
_init = _function("sem_init", _WAITING, _POINTER, ctypes.c_int, ctypes.c_uint)
_post = _function("sem_post", _AT_ONCE, _POINTER)
_trywait = _function("sem_trywait", _AT_ONCE, _POINTER)
if hasattr(_WAITING, "sem_clockwait"):
    _CLOCK = time.CLOCK_MONOTONIC
    _clockwait = _function("sem_clockwait", _WAITING, _POINTER, ctypes.c_int, ctypes.POINTER(_Time))

    def _wait(pointer, deadline):
        return _clockwait(pointer, _CLOCK, deadline)
else:  # glibc before 2.30
    _CLOCK = time.CLOCK_REALTIME
    _wait = _function("sem_timedwait", _WAITING, _POINTER, ctypes.POINTER(_Time))


class Semaphore:
    """A POSIX semaphore, at zero.

    Parameters
    ----------
    memory : SharedMemory

    Attributes
    ----------
    post : callable
        ``post()`` adds one.
    fails : callable
        ``fails()`` takes one away, if there is one, and returns 0; else it returns another number.
    """

    __slots__ = ("_block", "_pointer", "post", "fails")

    def __init__(self, memory):
        self._block = memory.allocate(_BYTES)
        self._pointer = _POINTER(self._block.ctypes.data)
        if _init(self._pointer, 1, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "sem_init")
        self.post = partial(_post, self._pointer)
        self.fails = partial(_trywait, self._pointer)

    def wait(self, seconds):
        """Take one away; False if there was none so long, or a signal's handler has to run."""
        fraction, whole = _modf(time.clock_gettime(_CLOCK) + seconds)
        if not _wait(self._pointer, _Time(whole, fraction)):
            return True
        code = ctypes.get_errno()
        if code in (errno.ETIMEDOUT, errno.EINTR):
            return False
        raise OSError(code, os.strerror(code), "sem_wait")

    def drain(self):
        """Take all away."""
        while not self.fails():
            pass


def _modf(seconds):
    """Return nanoseconds and whole seconds."""
    whole = int(seconds)
    return int((seconds - whole) * 1e9), whole
