"""A request to stop: a number in the commons of each machine, which any rank can raise."""

from __future__ import annotations

import numpy as np

from synkhronos.machines.leaders import FLAG, Leaders


class SpreadFlag:
    """The number on this machine, as its leader sees it.

    Parameters
    ----------
    leaders : Leaders
    """

    def __init__(self, leaders: Leaders) -> None:
        self._leaders = leaders
        self._flag: np.ndarray | None = None

    def begin(self, flag: np.ndarray | None = None) -> None:
        """Spread this number from now on; with None, spread none."""
        self._flag = flag

    def pass_on(self) -> None:
        """Raise the number to the highest on the other machines, or tell them if it is higher here."""
        if self._flag is None:
            return
        own = int(self._flag[0])
        if own > self._leaders.flag:
            self._leaders.flag = own
            self._leaders.notify(FLAG, own)
        elif own < self._leaders.flag:
            self._flag[0] = self._leaders.flag
