"""Gives operations that change gradients, such as ``grad_clip``, the gradients of the serial loss.

The gradient of a mean over the rows of a rank is larger than the gradient of the mean over all rows: for
each row, by the number of all rows divided by the number of the rank's rows. The average over the ranks,
weighted by their rows, corrects this afterwards. An operation that is not homogeneous needs the
correction before. So its input is multiplied by the rank's share of the rows, and its output is divided
by this share.

Such operations get the gradients of rows, of which each rank has its own. A gradient that is already
the sum over the rows of a rank cannot be changed as the sum over all rows would be.
"""

from __future__ import annotations

from typing import Any, Container, Iterable, Mapping, Sequence

import numpy

import synkhronos as synk
from synkhronos.engines import names
from synkhronos.engines.analysis.graphs import (
    Dependence,
    gradient_seeds,
    inputs_first,
    nodes_with_steps,
    operands_with,
    rebuilt,
    with_inputs,
)
from synkhronos.engines.names import Apply, GradClip, SharedVariable, Variable
from synkhronos.engines.names import tensor as tt
from synkhronos.extensions.steps import errors
from synkhronos.extensions.steps.definition import Definition
from synkhronos.extensions.steps.homogeneity import (
    HOMOGENEOUS,
    OTHER,
    SHIFTED,
    carrying_from,
    kind_of,
)
from synkhronos.extensions.steps.linear import terms
from synkhronos.extensions.steps.losses import values_of


class GradientScaling:
    """Scales the gradients of a step where operations change them.

    Parameters
    ----------
    definition : Definition
        The step.
    full : Dependence
        Which variables differ from rank to rank.

    Attributes
    ----------
    counting : list of (shared, new)
        Updates that each rank makes before it computes gradients: they count the rows of all ranks.
    """

    def __init__(self, definition: Definition, full: Dependence) -> None:
        self._definition, self._full = definition, full
        self.counting: list[tuple[SharedVariable, Variable]] = []

    def applied(self, gradients: Sequence[Variable], op: str) -> list[Variable]:
        """Return expressions of gradients that are combined by `op`, rewritten where that is needed.

        Raises
        ------
        ValueError
            If an operation changes a gradient that is already a sum over the rows of a rank.
        """
        changing, carrying = _changes_of(gradients, self._definition, self._full)
        if op != "avg" or not changing:
            return list(gradients)

        def apply(node: Apply, inputs: list[Variable]) -> list[Variable]:
            if node not in changing:
                return with_inputs(node, inputs)
            scaled = [
                _times(new, self._share(new.dtype)) if old in carrying else new
                for old, new in zip(node.inputs, inputs)
            ]
            outputs = with_inputs(node, scaled)
            return [
                _times(new, 1 / self._share(new.dtype)) if old in carrying else new
                for old, new in zip(node.outputs, outputs)
            ]

        return rebuilt(gradients, {}, self._definition.givens, apply)

    def _share(self, dtype: str) -> Any:
        """Return the number of the rank's rows, over the number of all rows."""
        rows = self._definition.rows
        # A batch of it is copied in order to be counted.
        counted = min(rows, key=lambda one: (isinstance(one, SharedVariable), one.type.ndim))
        count = counted.shape[rows[counted]]
        if not self.counting:
            total = names.shared(numpy.ones((), "int64"), "all_rows", ())
            self.counting.append((total, synk.ops.all_reduce(tt.cast(count, "int64"), "sum")))
        return tt.cast(count, dtype) / tt.cast(self.counting[0][0], dtype)


def _times(variable: Variable, factor: Variable) -> Variable:
    return variable.type.filter_variable(tt.cast(variable * factor, variable.dtype))


def _changes_of(
    gradients: Sequence[Variable], definition: Definition, full: Dependence
) -> tuple[set[Apply], set[Variable]]:
    """Return the nodes that change gradients of rows, and the variables that carry gradients.

    Parameters
    ----------
    gradients : list of variables
        Expressions of gradients.
    definition : Definition
        The step.
    full : Dependence
        Which variables differ from rank to rank.

    Raises
    ------
    ValueError
        If an operation changes a gradient that is already a sum over the rows of a rank.
    """
    parents = operands_with(definition.givens)
    seeds = gradient_seeds(gradients, parents)
    order = list(inputs_first(gradients, lambda one: () if one in seeds else parents(one)))
    carrying = carrying_from(set(seeds), order)
    kinds = {}
    for node in dict.fromkeys(one.owner for one in order if one.owner is not None):
        operands = [one for one in node.inputs if one in carrying and full.of(one)]
        kind = kind_of(node, carrying) if operands else HOMOGENEOUS
        if kind != HOMOGENEOUS:  # a value that is the same on every rank stays the same
            kinds[node] = kind, operands
    if not kinds:
        return set(), carrying
    _check_parameters(seeds.values(), definition)
    is_sum = _sums(order, carrying, seeds.values(), kinds, definition)
    return _changing(order, kinds, is_sum), carrying


def _changing(
    order: Sequence[Variable],
    kinds: Mapping[Apply, tuple[str, list[Variable]]],
    is_sum: Mapping[Variable, bool | None],
) -> set[Apply]:
    """Return the nodes that change gradients of rows, or the results of other such nodes."""
    changing: set[Apply] = set()
    changed: set[Variable] = set()
    for node in dict.fromkeys(one.owner for one in order if one.owner is not None):
        kind, operands = kinds.get(node, (HOMOGENEOUS, []))
        sums = [is_sum[one] for one in operands]
        if kind == OTHER and True in sums:
            raise errors.changed_after_sum(node)
        changes = kind != HOMOGENEOUS and True not in sums
        if kind == SHIFTED and changes:  # the average of sums that are shifted is shifted alike
            changes = None not in sums or not changed.isdisjoint(operands)
        if changes:
            changing.add(node)
        if changes or not changed.isdisjoint(node.inputs):
            changed.update(node.outputs)
    return changing


def _sums(
    order: Sequence[Variable],
    carrying: Container[Variable],
    losses: Iterable[Variable],
    kinds: Mapping[Apply, tuple[str, list[Variable]]],
    definition: Definition,
) -> dict[Variable, bool | None]:
    """Return whether each operand is a sum over the rows, or has an axis of rows, or None."""
    reductions = definition.reductions
    numbers = {number for loss in losses for number in reductions.numbers_of_gradients(loss)}
    found: set[Variable] = set()
    for one in order:
        if one in carrying:
            above = [] if one.owner is None else [each for each in one.owner.inputs if each in carrying]
            is_above = bool(above) and found.issuperset(above)
            if is_above or reductions.number_of(one) in numbers:
                found.add(one)
    operands = list(dict.fromkeys(one for _, each in kinds.values() for one in each))
    known = zip(operands, values_of(operands, definition))
    return {
        one: True if one in found else None if value is None else value.axis is None
        for one, value in known
    }


def _check_parameters(losses: Iterable[Variable], definition: Definition) -> None:
    """Raise an error if gradients of terms that do not depend on the rows are clipped."""
    rows = Dependence(definition.rows, definition.givens)
    parents = operands_with(definition.givens)
    for loss in losses:
        for term, _ in terms(loss, rows):
            order = list(inputs_first([term], parents))
            having = {one for one in order if rows.of(one)}
            for node, inner in nodes_with_steps(order, having, lambda node, having: node.outputs):
                if isinstance(node.op, GradClip) and node.inputs[0] not in inner:
                    raise errors.changed_after_sum(node)
