"""How the ranks of a program are asked to stop, and where each of them stops.

A request is a flag in memory that all ranks read. Ranks that do not meet in collectives stop where they
notice it: between two minibatches, or at the next call of their `Rank` if the program never asks. Ranks
that meet must not stop at different points, because some would wait for the others. So each collective
tells every rank whether any rank has noticed the request, and all stop after the same collective.
"""

from __future__ import annotations

import numpy as np

ASKED, INTERRUPTED = 1, 2


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
