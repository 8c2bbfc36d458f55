"""Unnamed semaphores in the memory that the ranks share.

A named semaphore is a file in ``/dev/shm`` between its creation and its unlinking, and the file remains
if the process is killed in between. A semaphore in an anonymous mapping needs no file and no descriptor,
and disappears with the last process that has the mapping.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from synkhronos.stores.memory import SharedMemory

#: The memory of a semaphore. sem_t is smaller on all systems; each gets its own cache line.
NBYTES = 64

_PLACE = ctypes.c_char * NBYTES


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


# Calls that never wait keep the interpreter's lock, which is faster, as is omitting the argument types.
_NON_BLOCKING = ctypes.PyDLL(None)
_BLOCKING = ctypes.CDLL(None, use_errno=True)
if hasattr(_BLOCKING, "sem_clockwait"):
    _CLOCK = time.CLOCK_MONOTONIC
    _WAIT: tuple = (_BLOCKING.sem_clockwait, _CLOCK)
else:  # glibc before 2.30
    _CLOCK = time.CLOCK_REALTIME
    _WAIT = (_BLOCKING.sem_timedwait,)


class Semaphore:
    """A POSIX semaphore, initially zero.

    Parameters
    ----------
    memory : SharedMemory, optional
        Where to allocate it.
    array : numpy.ndarray, optional
        Used instead of `memory`: the `NBYTES` bytes of the semaphore, shared with other processes.
    is_new : bool
        Whether to initialize it. Do not initialize a semaphore that other processes already use.

    Attributes
    ----------
    post : callable
        ``post()`` increments it.
    try_wait : callable
        ``try_wait()`` decrements it and returns 0, or returns another number if it is zero.
    """

    __slots__ = ("post", "try_wait", "_wait")

    def __init__(
        self, memory: SharedMemory | None = None, array: np.ndarray | None = None, is_new: bool = True
    ) -> None:
        if array is None:
            array = memory.allocate(NBYTES)  # type: ignore[union-attr]  # one of the two is given
        place = ctypes.byref(_PLACE.from_buffer(array))  # type: ignore[arg-type]  # NumPy has no hint
        if is_new and _BLOCKING.sem_init(place, 1, 0):
            raise _error("sem_init")
        self.post = partial(_NON_BLOCKING.sem_post, place)
        self.try_wait = partial(_NON_BLOCKING.sem_trywait, place)
        function, *clock = _WAIT
        self._wait = partial(function, place, *clock)

    def wait(self, seconds: float) -> bool:
        """Decrement it. Return False after `seconds`, or if a signal handler must run."""
        fraction, whole = _modf(time.clock_gettime(_CLOCK) + seconds)
        if not self._wait(ctypes.byref(_Time(whole, fraction))):
            return True
        if ctypes.get_errno() in (errno.ETIMEDOUT, errno.EINTR):
            return False
        raise _error("sem_wait")

    def drain(self) -> None:
        """Set it to zero."""
        while not self.try_wait():
            pass


class Counter:
    """A number that several processes increase: a semaphore for which none ever waits.

    Parameters
    ----------
    memory : SharedMemory
        Where to allocate it.

    Attributes
    ----------
    increase : callable
        ``increase()`` adds 1 to it.
    reset : callable
        ``reset()`` sets it to 0.
    """

    __slots__ = ("increase", "reset", "_read", "_found")

    def __init__(self, memory: SharedMemory) -> None:
        place = ctypes.byref(_PLACE.from_buffer(memory.allocate(NBYTES)))  # type: ignore[arg-type]  # as above
        if _BLOCKING.sem_init(place, 1, 0):
            raise _error("sem_init")
        self.increase = partial(_NON_BLOCKING.sem_post, place)
        self.reset = partial(_NON_BLOCKING.sem_init, place, 1, 0)
        self._found = ctypes.c_int()
        self._read = partial(_NON_BLOCKING.sem_getvalue, place, ctypes.byref(self._found))

    def read(self) -> int:
        """Return the number. Who has increased it last finds all increases in it."""
        self._read()
        return self._found.value


def _modf(seconds: float) -> tuple[int, int]:
    """Return nanoseconds and whole seconds."""
    whole = int(seconds)
    return int((seconds - whole) * 1e9), whole


def _error(name: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), name)
