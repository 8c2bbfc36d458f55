"""Completes all-reduces of vectors that began while a function computed the vectors.

If possible, a function that fills a vector in buckets already begins to reduce it. An all-reduce in the
same command completes this, provided that it requests the same reduction. Otherwise all ranks reduce
their vectors as usual; the vectors still have the ranks' own values.
"""

from __future__ import annotations

from typing import Any, Sequence

from synkhronos._typing import SharedVariable
from synkhronos.arithmetic.operations import find_operation
from synkhronos.engines.base import Engine
from synkhronos.world.rank_state import RankState


def begun(
    engine: Engine, numbers: Sequence[int], variables: Sequence[SharedVariable]
) -> list[tuple[int, int]]:
    """Return which variables are filled in buckets: their numbers, and the numbers of the `Buckets`."""
    found = [(one, engine.buckets_of(shared)) for one, shared in zip(numbers, variables)]
    return [(one, buckets.number) for one, buckets in found if buckets is not None]


def has_completed(state: RankState, command: Any, number: int) -> bool:
    """Complete the reduction of a variable for a `Reduce`, if it was begun; return whether it was.

    Only ranks that have an `OverlappedReduction` call this. The return value is the same on all of them.
    """
    if state.overlap.running is None or number not in command.begun:
        return False
    buckets, function, *_ = state.overlap.running
    wanted = command.begun[number], command.op, command.wire
    if (buckets.number, buckets.op, buckets.wire) != wanted:
        return False
    if find_operation(command.op).weighted and command.weights != function:
        return False
    state.overlap.finish(state.engine.storage(state.shareds[number]))
    return True
