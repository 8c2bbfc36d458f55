"""The values of the parameters on this rank, and waiting until all ranks have finished their steps."""

from __future__ import annotations

from typing import Mapping, Sequence

import numpy

import synkhronos as synk
from synkhronos.engines.names import SharedVariable

Params = Sequence[SharedVariable]

#: The clock of a rank that takes no more steps.
END = 1 << 62


def values_of(params: Params) -> list[numpy.ndarray]:
    """Return copies of this rank's values."""
    return [numpy.array(one.get_value(borrow=True)) for one in params]


def assign(params: Params, values: Sequence[numpy.ndarray]) -> None:
    """Set this rank's parameters to copies of values."""
    for one, value in zip(params, values):
        one.set_value(value)


def pack(name: str, values: Sequence[numpy.ndarray] | None) -> dict[str, numpy.ndarray]:
    """Return arrays for each parameter as items of a rule's state."""
    return {f"{name} {position}": value for position, value in enumerate(values or ())}


def unpack(name: str, params: Params, state: Mapping | None) -> list[numpy.ndarray] | None:
    """Return the arrays that were given to `pack`, or None if the state does not have them."""
    if not state or f"{name} 0" not in state:
        return None
    return [numpy.array(state[f"{name} {position}"]) for position in range(len(params))]


def meet(rank: synk.Rank) -> None:
    """Wait until every rank has taken its last step, even in programs without collectives."""
    rank.clock = END
    rank.wait_for_clocks(END)
