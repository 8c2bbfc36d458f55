"""One rank's run of a program: when it has to end, and how the ranks are asked to stop.

A request is a flag in memory that all ranks read. Ranks that do not meet in collectives stop where they
notice it: between two minibatches, or at the next call of their `Rank` if the program never asks. Ranks
that meet must not stop at different points, because some would wait for the others. So each collective
tells every rank whether any rank has noticed the request, and all stop after the same collective.
"""

from __future__ import annotations

import time
from typing import Callable

import numpy as np

from synkhronos._errors import SynkhronosError
from synkhronos.world.rank_state import RankState

ASKED, INTERRUPTED = 1, 2

_NAP = 2e-4  # seconds between two attempts to acquire a lock that another rank holds
_NEW_WAIT = 1.0  # seconds without a pause after which a new wait has begun


class StopProgram(BaseException):
    """Ends the program of a rank; it is not an ``Exception``, so that programs do not catch it."""


class Stop:
    """The request to stop, as one rank sees it.

    Parameters
    ----------
    flag : numpy.ndarray
        One int64 that all ranks share: 0, `ASKED` or `INTERRUPTED`.

    Attributes
    ----------
    in_step : bool
        Whether the ranks meet in collectives inside their loops.
    """

    def __init__(self, flag: np.ndarray) -> None:
        self._flag = flag
        self.in_step = False
        self._is_watched = False  # whether the program itself checks for requests to stop
        self._is_agreed = False

    @property
    def is_asked(self) -> bool:
        return bool(self._flag[0])

    @property
    def is_interrupted(self) -> bool:
        return bool(self._flag[0] == INTERRUPTED)

    def ask(self, how: int = ASKED) -> None:
        """Ask all ranks to stop."""
        self._flag[0] = max(self._flag[0], how)  # an interrupt is not overwritten

    def watch(self) -> bool:
        """Return whether this rank has to stop, for a program that ends its loops by itself."""
        self._is_watched = True
        return self._is_agreed if self.in_step else self.is_asked

    def check(self) -> None:
        """Raise `StopProgram` if the ranks are asked to stop and the program never checks for that."""
        if self._flag[0] and not self._is_watched:
            raise StopProgram

    def met(self, asked: bool) -> None:
        """Record a collective, and whether any rank had noticed a request before it."""
        self.in_step = self.in_step or self._is_watched
        self._is_agreed = self._is_agreed or asked


class Run:
    """This rank's run of a program, which ends if another rank fails or a wait is too long.

    Parameters
    ----------
    state : RankState
        The state of this rank.
    announce : callable
        Called by the master from time to time after an interrupt.

    Attributes
    ----------
    stop : Stop
        The request to stop.
    """

    def __init__(self, state: RankState, announce: Callable[[], None]) -> None:
        self._rank_state, self._announce = state, announce
        flag = state.store.named_memory.array("stop", (1,), "int64")
        state.transport.spread(flag)
        self.stop = Stop(flag)
        self._has_ended = False
        self._began = self._paused = 0.0  # when the wait began, and the last pause in it

    def end(self) -> None:
        """Refuse everything from now on; the memory in the named memory may have another use."""
        self._has_ended = True

    def check_running(self) -> None:
        """Raise if the program has ended."""
        if self._has_ended:
            raise RuntimeError(
                f"the program of rank {self._rank_state.rank} has ended; use a rank and its centers "
                f"only inside the program that got the rank, and return from it what is needed outside"
            )

    def check(self) -> None:
        """Raise if the program has ended, or has to end because another rank has failed."""
        self.check_running()
        self._rank_state.transport.check()
        if self._rank_state.is_master and self.stop.is_interrupted:
            self._announce()

    def enter(self) -> None:
        """Begin a method of `Rank`: end the program if it has to end."""
        self.check()
        self.stop.check()
        self._began = time.monotonic()

    def pause(self, seconds: float = _NAP) -> None:
        """Wait briefly for another process; raise if the program has to end, or the wait is too long."""
        self.check()
        limit, now = self._rank_state.transport.timeout, time.monotonic()
        if now - self._paused > _NEW_WAIT:
            self._began = now
        self._paused = now
        if limit is not None and now - self._began > limit:
            raise SynkhronosError(
                f"rank {self._rank_state.rank} waited longer than fork(timeout={limit}) seconds for "
                f"another process"
            )
        if seconds:
            time.sleep(seconds)
