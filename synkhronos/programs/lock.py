"""A lock for the ranks of a program, on any machine, that the death of its holder releases."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, Callable

_NBYTES = 64  # of a stripe that holds nothing


class ProgramLock:
    r"""A lock between ranks. `Rank.lock` returns it.

    Parameters
    ----------
    open_stripes : callable
        Creates the stripes, as for `Center`.
    name : str
    pause : callable
        Called while another rank has the lock.
    enter : callable
        Called before each wait; it raises if the program must end.
    turn : context manager
        Entered while this rank looks at the lock, but not while it waits.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.fork(2, use_gpu=False)
    2
    >>> def program(rank, path):
    ...     with rank.lock():
    ...         with open(path, "a") as file:
    ...             print("rank", rank.rank, "of", rank.size, file=file)
    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = synk.spmd(program, os.path.join(folder, "log"))
    ...     sorted(open(os.path.join(folder, "log")))
    ['rank 0 of 2\n', 'rank 1 of 2\n']
    >>> synk.close()
    """

    def __init__(
        self,
        open_stripes: Callable[..., Any],
        name: str,
        pause: Callable[[], None],
        enter: Callable[[], None],
        turn: AbstractContextManager[Any],
    ) -> None:
        self._pause, self._enter, self._turn, self._name = pause, enter, turn, name
        self._stripes = open_stripes(
            f"lock {name}", b"lock", _accept, 1, _NBYTES, _leave_empty, pause
        )  # fmt: skip
        self._is_held = False

    def __repr__(self) -> str:
        state = "held by this rank" if self._is_held else "not held by this rank"
        return f"<synkhronos.ProgramLock {self._name}, {state}>"

    def acquire(self, timeout: float | None = None) -> bool:
        """Wait until no rank has the lock, and take it.

        Parameters
        ----------
        timeout : float, optional
            The longest time to wait, in seconds. By default there is no limit.

        Returns
        -------
        bool
            Whether this rank has the lock; False after the time limit.

        Raises
        ------
        RuntimeError
            If this rank has it already.
        """
        self._enter()
        if self._is_held:
            raise RuntimeError(
                f"rank.lock: this rank has the lock {self._name!r} already; release it before, or use "
                f"a lock of another name"
            )
        until = None if timeout is None else time.monotonic() + timeout
        while not self._try():
            if until is not None and time.monotonic() >= until:
                return False
            self._pause()
        return True

    def _try(self) -> bool:
        with self._turn:
            self._is_held = self._stripes.try_hold()
        return self._is_held

    def release(self) -> None:
        """Give the lock to another rank.

        Raises
        ------
        RuntimeError
            If this rank does not have it.
        """
        if not self._is_held:
            raise RuntimeError(f"rank.lock: this rank does not have the lock {self._name!r}")
        with self._turn:
            self._is_held = False
            self._stripes.let_go()

    def __enter__(self) -> ProgramLock:
        self.acquire()
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


def _accept(layout: bytes) -> None:
    """Accept the layout of another rank's lock, which is always the same."""


def _leave_empty(number: int, memory: Any) -> None:
    """Write nothing into the stripe."""
