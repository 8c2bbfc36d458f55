"""On which inputs the results of a function depend, read from its graph before optimization."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from synkhronos.engines.analysis.graphs import loss_ops
from synkhronos.engines.analysis.rows import extents
from synkhronos.engines.base import Analysis, Dependence
from synkhronos.engines.bucketed_vector import BucketReady
from synkhronos.engines.collectives import Collective, is_peers
from synkhronos.engines.names import (
    VIEWS,
    Apply,
    Elemwise,
    SharedVariable,
    Variable,
    io_toposort,
    scalar,
)

_ELEMENTWISE = (
    scalar.Add, scalar.Sub, scalar.Mul, scalar.Neg, scalar.Cast, scalar.Identity, scalar.Maximum,
    scalar.Minimum,
)  # fmt: skip
_FIRST_ONLY = (scalar.TrueDiv,)  # linear in the first operand only
_VIEWS = (*VIEWS, BucketReady)


def analyze(
    specifications: Sequence[Any], outputs: Sequence[Variable], axes: Sequence[int | str | None]
) -> Analysis:
    """Return the `Analysis` of a graph.

    Parameters
    ----------
    specifications : list
        The specifications of the inputs: each has a variable, and its update or None.
    outputs : list of variables
    axes : list
        As of `Engine.analyze`.
    """
    inputs = [one.variable for one in specifications]
    updates = [(one.variable, one.update) for one in specifications if one.update is not None]
    arguments, results = arguments_and_results(specifications, outputs)
    nodes = io_toposort(inputs, results)
    masks, own = _masks(inputs, nodes), _masks(inputs, nodes, is_cut=True)
    positions = {one: position for position, one in enumerate(arguments)}
    found = [
        Dependence(
            *_dependence(masks.get(one, 0), inputs, positions),
            *_dependence(own.get(one, 0), inputs, positions),
        )
        for one in results
    ]
    return Analysis(
        outputs=found[: len(outputs)],
        updates={shared: one for (shared, _), one in zip(updates, found[len(outputs) :])},
        accumulated=frozenset(
            shared for shared, new in updates if _accumulates(shared, new, masks, inputs)
        ),
        extents=extents(arguments, axes, outputs),
        loss_ops=loss_ops(nodes, outputs),
    )


def arguments_and_results(
    specifications: Sequence[Any], outputs: Sequence[Variable]
) -> tuple[list[Variable], list[Variable]]:
    """Return the arguments of a function, without the peers, and all of its results."""
    inputs = [one.variable for one in specifications]
    arguments = [one for one in inputs if not isinstance(one, SharedVariable) and not is_peers(one)]
    return arguments, [*outputs, *(one.update for one in specifications if one.update is not None)]


def _masks(
    inputs: Sequence[Variable], nodes: Sequence[Apply], is_cut: bool = False
) -> dict[Variable, int]:
    """Return, for each variable, the inputs that it depends on as the bits of a number.

    If `is_cut`, results of collectives that are the same on every rank depend on nothing.
    """
    masks = {variable: 1 << number for number, variable in enumerate(inputs) if not is_peers(variable)}
    for node in nodes:
        mask = 0
        if is_cut and isinstance(node.op, Collective) and node.op.is_same_everywhere:
            continue
        for one in node.inputs:
            mask |= masks.get(one, 0)
        for one in node.outputs:
            masks[one] = mask
    return masks


def _dependence(
    mask: int, inputs: Sequence[Variable], positions: Mapping[Variable, int]
) -> tuple[frozenset[int], frozenset[SharedVariable]]:
    used = [one for number, one in enumerate(inputs) if mask >> number & 1]
    return (
        frozenset(positions[one] for one in used if one in positions),
        frozenset(one for one in used if one not in positions),
    )


def _accumulates(
    shared: SharedVariable, new: Variable, masks: Mapping[Variable, int], inputs: Sequence[Variable]
) -> bool:
    """Whether the old value enters the new value only elementwise: in sums, multiples, or as a part."""
    own = 1 << inputs.index(shared)
    waiting, seen = [new], set()
    while waiting:
        variable = waiting.pop()
        if variable is shared or variable in seen or not masks.get(variable, 0) & own:
            continue
        seen.add(variable)
        op = variable.owner.op
        using = [one for one in variable.owner.inputs if masks.get(one, 0) & own]
        if isinstance(op, Elemwise):
            if isinstance(op.scalar_op, scalar.Mul) and len(using) > 1:
                return False
            divides = isinstance(op.scalar_op, _FIRST_ONLY) and using == variable.owner.inputs[:1]
            if not divides and not isinstance(op.scalar_op, _ELEMENTWISE):
                return False
        elif not isinstance(op, _VIEWS):
            return False
        waiting.extend(using)
    return True
