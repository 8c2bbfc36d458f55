"""Collectives inside a program: the usual collectives' commands, run by all ranks at the same point.

Ranks come to a collective by themselves, so each rank first tells the others which collective it is at.
"""

from __future__ import annotations

import pickle
from typing import Any, Callable, Hashable

from synkhronos._errors import SynkhronosError
from synkhronos.programs.stopping import Stop
from synkhronos.world.here import Here


class Meeting:
    """The meetings of the ranks of a program.

    Parameters
    ----------
    here : Here
    stop : Stop
        Every meeting spreads the request to stop.

    Attributes
    ----------
    before : callable
        Called before each meeting. Messages that a rank sent before a meeting can be received after it.
    """

    def __init__(self, here: Here, stop: Stop) -> None:
        self._here, self._stop = here, stop
        self.before: Callable[[], None] = lambda: None

    def agree(self, name: str, *what: Hashable, own: Any = None) -> list:
        """Wait for all ranks, which must call it with equal arguments; return each rank's `own`.

        Raises
        ------
        SynkhronosError
            On every rank, if the arguments differ: the ranks are at different points of the program.
        """
        self.before()
        called = name, *what
        item = pickle.dumps((called, self._stop.is_asked, own), pickle.HIGHEST_PROTOCOL)
        by_rank = [pickle.loads(one) for one in self._here.transport.exchange(item)]
        if any(one[0] != called for one in by_rank):
            listed = "; ".join(f"rank {rank}: {_text(one[0])}" for rank, one in enumerate(by_rank))
            raise SynkhronosError(
                f"the ranks of the program are at different collectives: {listed}; let every rank call "
                f"the same ones in the same order, for the same variables"
            )
        self._stop.met(any(one[1] for one in by_rank))
        return [one[2] for one in by_rank]


def _text(called):
    name, *what = called
    return f"{name}({', '.join(map(str, what))})"
