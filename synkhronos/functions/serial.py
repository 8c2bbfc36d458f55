"""Commands on one rank alone: the master, with the rows of all ranks and nobody to meet."""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np

from synkhronos.comms.alone import AloneCommunicator
from synkhronos.functions.call import CallFunction
from synkhronos.functions.columns import Column
from synkhronos.world.here import Here

_ULPS = 4  # by how much `Perturbed` changes a number


class Alone(Here):
    """The state of the master as the only rank: the same replicas, store and engine.

    Parameters
    ----------
    here : Here
        The state of the master.
    """

    rank = property(lambda self: 0)

    def __init__(self, here: Here) -> None:
        vars(self).update(vars(here))
        self.size, self.master_rank = 1, 0
        self.comm, self.ahead, self.log = AloneCommunicator(_Single()), None, None
        self.rows, self.peers, self.wires, self.sent = {}, {}, {}, []


class _Single:
    """A group of one rank."""

    rank, size = 0, 1

    def barrier(self):
        return

    def exchange(self, item):
        return [item]


class Perturbed(Alone):
    """The same, where floating-point rows differ by a few units in the last place.

    By how much the results change shows how they magnify rounding.
    """

    def take(self, key: Any, source: Any, rows: Any, axis: int = 0) -> Any:
        taken = super().take(key, source, rows, axis)
        if not isinstance(taken, np.ndarray) or taken.dtype.kind not in "fc":
            return taken
        signs = np.random.RandomState(0).choice([-_ULPS, _ULPS], taken.shape)
        return taken * (1 + np.finfo(taken.dtype).eps * signs).astype(taken.dtype)


class SerialCall(CallFunction):
    """A call in one piece, on the rows of all ranks."""

    _rows_of: Mapping[int, Any] = {}

    @staticmethod
    def of(call: CallFunction, rows_of: Mapping[int, Any]) -> SerialCall:
        """Return a call like another one.

        Parameters
        ----------
        call : CallFunction
        rows_of : dict
            The rows of all ranks of sliceable shared variables, by number.
        """
        made = SerialCall(call.number, call.handles, call.splits, call.rows, None, 1, call.subset)
        made.most = call.most._replace(by_rank=None)
        made._rows_of = rows_of
        return made

    def _sliceable(self, here, number):
        array = self._rows_of[number]
        return Column(array, range(len(array)), 0, (self.number, "shared", number))
