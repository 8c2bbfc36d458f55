"""All-reduces of vectors that were begun while a function computed them, and how they are completed.

A function that fills a vector in buckets has begun to reduce it, if that is possible; an all-reduce in
the same command completes this. It does so only if it asks for the same: otherwise all ranks reduce
their vectors as always, which still have their own values.
"""

from __future__ import annotations

from typing import Any, Sequence

from synkhronos._typing import SharedVariable
from synkhronos.arithmetic.operations import find_operation
from synkhronos.engines.base import Engine
from synkhronos.world.here import Here


def begun(
    engine: Engine, numbers: Sequence[int], variables: Sequence[SharedVariable]
) -> list[tuple[int, int]]:
    """Return which variables are filled in buckets: their numbers, and the numbers of the `Buckets`."""
    found = [(one, engine.buckets_of(shared)) for one, shared in zip(numbers, variables)]
    return [(one, buckets.number) for one, buckets in found if buckets is not None]


def has_completed(here: Here, command: Any, number: int) -> bool:
    """Complete the reduction of a variable for a `Reduce`, if it was begun; return whether it was.

    All ranks return the same.
    """
    if here.ahead is None or here.ahead.running is None or number not in command.begun:
        return False
    buckets, function, *_ = here.ahead.running
    wanted = command.begun[number], command.op, command.wire
    if (buckets.number, buckets.op, buckets.wire) != wanted:
        return False
    if find_operation(command.op).weighted and command.weights != function:
        return False
    here.ahead.finish(here.engine.storage(here.shareds[number]))
    return True
