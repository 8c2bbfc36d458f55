"""Locks at the moment when a process is forked.

Of the threads of a process, only the forking thread is in the copy. A lock that another thread holds at
that moment stays locked there, and a thread that wants it waits forever. Python's ``logging`` and the C
library take care of their locks themselves. `GeneratorLocks` holds those of NumPy's generators,
which scripts share between a thread that prepares data and operations or programs. `warn_of_threads`
warns of locks that the package cannot know of, such as the script's own.
"""

from __future__ import annotations

import gc
import importlib._bootstrap
import sys
import threading
from typing import Any

import numpy as np

from synkhronos._errors import warn
from synkhronos._text import listed

_PATIENCE = 1.0  # seconds for a thread to draw its numbers
#: Threads of these packages do nothing that operations and programs do.
_HARMLESS = {"synkhronos", "ipykernel", "IPython", "zmq", "tornado", "tqdm", "execnet", "debugpy"}


class GeneratorLocks:
    """Holds the locks of NumPy's generators in a block, in which a process is forked.

    The copy has to call `give_back` at its start, as it never leaves the block.
    """

    def __enter__(self) -> GeneratorLocks:
        self._locks = [np.random.mtrand._rand._bit_generator.lock]
        if threading.active_count() > 1:
            kind = np.random.BitGenerator
            # The class of a dead `weakref.proxy` can be asked for, but not whether it is an instance.
            found = {id(one.lock): one.lock for one in gc.get_objects() if issubclass(type(one), kind)}
            self._locks = [*{**found, id(self._locks[0]): self._locks[0]}.values()]
        self._held: list[Any] = []
        for lock in self._locks:
            if lock.acquire(timeout=_PATIENCE):
                self._held.append(lock)
        return self

    def __exit__(self, *error: object) -> None:
        while self._held:
            self._held.pop().release()

    def give_back(self) -> None:
        """In the copy: release all of them, also those of threads that the copy does not have."""
        for lock in self._locks:
            # NumPy 2.4 has reentrant locks, which only their holder can release.
            if hasattr(lock, "_at_fork_reinit"):  # since Python 3.9
                lock._at_fork_reinit()
            elif lock.locked():
                lock.release()
        # A module that another thread was importing can be imported once more.
        importlib._bootstrap._module_locks.clear()  # type: ignore[attr-defined]  # it is internal


def other_threads() -> list[threading.Thread]:
    """Return the script's threads, apart from the main thread and this thread."""
    own = threading.main_thread(), threading.current_thread()
    others = [one for one in threading.enumerate() if one not in own and not _has_ended(one)]
    return [one for one in others if not _is_harmless(one)]


def _has_ended(thread: threading.Thread) -> bool:
    """Whether a thread that was not started by `threading` is only remembered, as before Python 3.13."""
    is_foreign = isinstance(thread, threading._DummyThread)
    return is_foreign and thread.ident not in sys._current_frames()


def _is_harmless(thread: threading.Thread) -> bool:
    modules = [type(thread).__module__, getattr(getattr(thread, "_target", None), "__module__", None)]
    return any(str(one).partition(".")[0] in _HARMLESS for one in modules)


def warn_of_threads() -> None:
    """Warn if there are other threads while workers are forked."""
    threads = other_threads()
    if threads:
        names = listed([one.name for one in threads])
        warn(
            f"other threads run while the workers are forked: {names}. A lock that one of them holds at "
            f"this moment stays locked in the workers, so an operation or a program that needs it waits "
            f"for ever. That can be a queue's lock, or one of your own; NumPy's generators, logging and "
            f"imports are safe. Start the threads after synk.distribute(), or do not use in operations "
            f"and programs what the threads use"
        )
