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

_PLACE = ctypes.c_char * 64  # more than sem_t has anywhere; a cache line of its own


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


# What never waits keeps the interpreter's lock: that is faster. So is to declare no argument types.
_AT_ONCE = ctypes.PyDLL(None)
_WAITING = ctypes.CDLL(None, use_errno=True)
if hasattr(_WAITING, "sem_clockwait"):
    _CLOCK = time.CLOCK_MONOTONIC
    _WAIT = (_WAITING.sem_clockwait, _CLOCK)
else:  # glibc before 2.30
    _CLOCK = time.CLOCK_REALTIME
    _WAIT = (_WAITING.sem_timedwait,)


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

    __slots__ = ("post", "fails", "_wait")

    def __init__(self, memory):
        place = ctypes.byref(_PLACE.from_buffer(memory.allocate(ctypes.sizeof(_PLACE))))
        if _WAITING.sem_init(place, 1, 0):
            raise _error("sem_init")
        self.post = partial(_AT_ONCE.sem_post, place)
        self.fails = partial(_AT_ONCE.sem_trywait, place)
        function, *clock = _WAIT
        self._wait = partial(function, place, *clock)

    def wait(self, seconds):
        """Take one away; False if there was none so long, or a signal's handler has to run."""
        fraction, whole = _modf(time.clock_gettime(_CLOCK) + seconds)
        if not self._wait(ctypes.byref(_Time(whole, fraction))):
            return True
        if ctypes.get_errno() in (errno.ETIMEDOUT, errno.EINTR):
            return False
        raise _error("sem_wait")

    def drain(self):
        """Take all away."""
        while not self.fails():
            pass


def _modf(seconds):
    """Return nanoseconds and whole seconds."""
    whole = int(seconds)
    return int((seconds - whole) * 1e9), whole


def _error(name):
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), name)
