"""What the graph of a function tells about the shared variables that it uses."""

from __future__ import annotations

from typing import Any

from synkhronos.engines.base import BOUND, Analysis
from synkhronos.functions.agreement import agreement_of
from synkhronos.world.world import World


def analyze(world: World, function: Any) -> Analysis:
    """Return what the graph of a function tells about its results."""
    axes: list[int | str | None] = [one.axis for one in function.inputs]
    if function.replica.lengths is not None:
        axes += [BOUND, BOUND]
    axes += [0] * len(function.replica.sliceable)
    return world.here.engine.analyze(function.replica.compiled, axes)


def uses(world: World, function: Any, analysis: Analysis) -> tuple[set[int], set[int]]:
    """Return two sets of numbers: the variables whose values results depend on, and more of them.

    The first has those that outputs computed from rows depend on, and new values of other variables, or
    of the same variable if it does more than accumulate. The second has all those where a value that is
    set on the master only has an effect.
    """
    replica = function.replica
    has_rows = bool(replica.sliceable) or replica.lengths is not None
    has_rows = has_rows or any(one.axis is not None for one in function.inputs)
    numbers, streams = world.registry.numbers, agreement_of(world).streams
    used, read = set(), set()
    if has_rows:
        for output in analysis.outputs:
            used |= output.shareds
    for shared, new in analysis.updates.items():
        if numbers[shared] in streams:
            continue
        read |= new.shareds
        if has_rows:
            used |= new.shareds - (analysis.accumulated & {shared})
    tensors = [one for one in used | read if world.here.engine.is_tensor(one)]
    return {numbers[one] for one in tensors if one in used} - streams, {
        numbers[one] for one in tensors
    } - streams


def sources(world: World, function: Any, analysis: Analysis) -> dict[int, tuple[bool, set[int]]]:
    """Return what new values are computed from, by the number of the updated variable.

    That is whether they depend on the rows of a rank, and the numbers of shared variables.
    """
    numbers, streams, inputs = world.registry.numbers, agreement_of(world).streams, function.inputs

    def is_split(position):
        return position >= len(inputs) or inputs[position].axis is not None

    return {
        numbers[shared]: (any(map(is_split, new.arguments)), {numbers[one] for one in new.shareds})
        for shared, new in analysis.updates.items()
        if numbers[shared] not in streams
    }
