"""Finds the operations that change gradients on their way from the loss, such as ``grad_clip`` does.

They get the gradients of rows, of which each rank has its own. A gradient that is already the sum over
the rows of a rank cannot be changed as the sum over all rows would be.
"""

from __future__ import annotations

from typing import Iterable, Mapping, Sequence

from synkhronos.engines.names import Apply, GradClip, Variable
from synkhronos.extensions.steps import refusals
from synkhronos.extensions.steps.dependence import Dependence
from synkhronos.extensions.steps.graphs import inputs_first, operands_with
from synkhronos.extensions.steps.homogeneity import (
    HOMOGENEOUS,
    OTHER,
    SHIFTED,
    carrying_from,
    kind_of,
)
from synkhronos.extensions.steps.linear import terms
from synkhronos.extensions.steps.loops import nodes_with_steps
from synkhronos.extensions.steps.losses import values_of
from synkhronos.extensions.steps.script import Script
from synkhronos.extensions.steps.seeds import seeds_of


def changes_of(
    gradients: Sequence[Variable], script: Script, full: Dependence
) -> tuple[set[Apply], set[Variable]]:
    """Return the nodes that change gradients of rows, and the variables that carry gradients.

    Parameters
    ----------
    gradients : list of variables
    script : Script
    full : Dependence
        Which variables differ from rank to rank.

    Raises
    ------
    ValueError
        If an operation changes what is already a sum over the rows of a rank.
    """
    parents = operands_with(script.givens)
    seeds = seeds_of(gradients, parents)
    order = list(inputs_first(gradients, lambda one: () if one in seeds else parents(one)))
    carrying = carrying_from(set(seeds), order)
    kinds = {}
    for node in dict.fromkeys(one.owner for one in order if one.owner is not None):
        operands = [one for one in node.inputs if one in carrying and full.of(one)]
        kind = kind_of(node, carrying) if operands else HOMOGENEOUS
        if kind != HOMOGENEOUS:  # what is the same on every rank is changed alike
            kinds[node] = kind, operands
    if not kinds:
        return set(), carrying
    _check_parameters(seeds.values(), script)
    is_sum = _sums(order, carrying, seeds.values(), kinds, script)
    return _changing(order, kinds, is_sum), carrying


def _changing(
    order: Sequence[Variable],
    kinds: Mapping[Apply, tuple[str, list[Variable]]],
    is_sum: Mapping[Variable, bool | None],
) -> set[Apply]:
    """Return the nodes that change gradients of rows, or of what other such nodes return."""
    changing: set[Apply] = set()
    changed: set[Variable] = set()
    for node in dict.fromkeys(one.owner for one in order if one.owner is not None):
        kind, operands = kinds.get(node, (HOMOGENEOUS, []))
        sums = [is_sum[one] for one in operands]
        if kind == OTHER and True in sums:
            raise refusals.changed_after_sum(node)
        changes = kind != HOMOGENEOUS and True not in sums
        if kind == SHIFTED and changes:  # the average of sums that are shifted is shifted alike
            changes = None not in sums or not changed.isdisjoint(operands)
        if changes:
            changing.add(node)
        if changes or not changed.isdisjoint(node.inputs):
            changed.update(node.outputs)
    return changing


def _sums(order, carrying, losses, kinds, script):
    """Return whether each operand is a sum over the rows, or has an axis of rows, or None."""
    numbers = {number for loss in losses for number in script.cuts.numbers_of_gradients(loss)}
    found = set()
    for one in order:
        if one in carrying:
            above = [] if one.owner is None else [each for each in one.owner.inputs if each in carrying]
            is_above = bool(above) and found.issuperset(above)
            if is_above or script.cuts.number_of(one) in numbers:
                found.add(one)
    operands = list(dict.fromkeys(one for _, each in kinds.values() for one in each))
    known = zip(operands, values_of(operands, script))
    return {
        one: True if one in found else None if value is None else value.axis is None
        for one, value in known
    }


def _check_parameters(losses: Iterable[Variable], script: Script) -> None:
    """Raise an error if gradients are clipped of what does not depend on the rows."""
    rows, parents = Dependence(script.rows, script.givens), operands_with(script.givens)
    for loss in losses:
        for term, _ in terms(loss, rows):
            order = list(inputs_first([term], parents))
            having = {one for one in order if rows.of(one)}
            for node, inner in nodes_with_steps(order, having, lambda node, having: node.outputs):
                if isinstance(node.op, GradClip) and node.inputs[0] not in inner:
                    raise refusals.changed_after_sum(node)
