"""Locks at the moment when a process is forked.

Of the threads of a process, only the forking thread is in the copy. A lock that another thread holds at
that moment stays locked there, and a thread that wants it waits forever. Python's ``logging`` and the C
library take care of their locks themselves. `GeneratorLocks` holds those of NumPy's generators,
which scripts share between a thread that prepares data and operations or programs. `warn_of_threads`
warns of locks that the package cannot know of, such as the script's own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib._bootstrap
import os
import sys
import threading
from typing import Any, Sequence

import numpy as np

from synkhronos._errors import warn
from synkhronos._text import listed
from synkhronos.host.handler_errors import stacks

_PATIENCE = 1.0  # seconds for a thread to draw its numbers
#: Threads of these packages do nothing that operations and programs do.
_HARMLESS = {"synkhronos", "ipykernel", "IPython", "zmq", "tornado", "tqdm", "execnet", "debugpy"}
#: Threads of these names are no reason to warn.
_HARMLESS_NAMES = ("jemalloc", "cuda")
#: Modules with threads that have no name, and that a copy of the process waits for
_UNNAMED = ("blosc", "blosc2")


class GeneratorLocks:
    """Holds the locks of NumPy's generators in a block, in which a process is forked.

    The copy has to call `give_back` at its start, as it never leaves the block.
    """

    def __enter__(self) -> GeneratorLocks:
        self._locks = [np.random.mtrand._rand._bit_generator.lock]
        if threading.active_count() > 1:
            kind = np.random.BitGenerator
            # The class of a dead `weakref.proxy` can be asked for, but not whether it is an instance.
            found = {
                id(item.lock): item.lock for item in gc.get_objects() if issubclass(type(item), kind)
            }
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
    others = [thread for thread in threading.enumerate() if thread not in own and not _has_ended(thread)]
    return [other for other in others if not _is_harmless(other)]


def _has_ended(thread: threading.Thread) -> bool:
    """Whether a thread that was not started by `threading` is only remembered, as before Python 3.13."""
    is_foreign = isinstance(thread, threading._DummyThread)
    return is_foreign and thread.ident not in stacks()


def _is_harmless(thread: threading.Thread) -> bool:
    modules = [type(thread).__module__, getattr(getattr(thread, "_target", None), "__module__", None)]
    return any(str(module).partition(".")[0] in _HARMLESS for module in modules)


def warn_of_threads(
    children: str = "the workers",
    code: str = "an operation or a program",
    started: str = "synk.distribute()",
    further: Sequence[str] = (),
) -> None:
    """Warn if there are other threads while children are forked.

    Parameters
    ----------
    children, code, started : str
        What is forked, what it runs that may need a lock, and after which call threads can be started.
    further : sequence of str
        The names of threads that Python does not know.
    """
    names = listed([*(other_thread.name for other_thread in other_threads()), *further])
    if names:
        warn(
            f"other threads run while {children} are forked: {names}. A lock that one of them holds at "
            f"this moment stays locked in {children}, so {code} that needs it waits for ever. That can "
            f"be a queue's lock, or one of your own; NumPy's generators, logging and imports are safe. "
            f"Start the threads after {started}, or do not use in {code} what the threads use"
        )


def threads_of_libraries() -> list[str]:
    """Return the names of threads that were not started by Python, where libraries name them."""
    if "jax" in sys.modules:  # it warns by itself
        return []
    known = {thread.native_id for thread in threading.enumerate()}
    found = [item for item in _UNNAMED if item in sys.modules]
    for number in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{number}/comm") as file:
            if int(number) not in known:
                found.append(file.read().strip())
    # A thread without a name of its own has that of the process, such as those of OpenBLAS.
    with open("/proc/self/comm") as file:
        own = file.read().strip()
    return [name for name in found if name != own and not name.startswith(_HARMLESS_NAMES)]
