"""Losses as sums of terms: how these depend on the rows, and statistics of all rows that they use.

`terms` and `split` divide an expression by the linear operations at its end. `check_losses` warns about
losses whose gradients are added up or averaged, although that is not their kind.

A loss such as ``(errors * mask).sum() / mask.sum()`` divides by a sum over the rows. Each rank would
divide by the sum over its own rows, so the average of the ranks is not the loss of all rows. The sum of
the mask depends on no parameter. So `with_statistics` has it added up over the ranks before, and in its
place each rank uses its share of it by the number of its rows, with which the average is exact.
"""

from __future__ import annotations

import copy
from typing import Any, Iterator, Mapping, Optional, Sequence, Tuple

import numpy

import synkhronos as synk
from synkhronos._errors import warn
from synkhronos.engines import names
from synkhronos.engines.analysis import graphs
from synkhronos.engines.analysis.difference_causes import CONSTANT, difference_causes, statistics_in
from synkhronos.engines.analysis.graphs import Dependence, inputs_first, rebuilt
from synkhronos.engines.analysis.rows import Rows, of_input, rows_of
from synkhronos.engines.analysis.rules import Powers, rule_of
from synkhronos.engines.base import Causes
from synkhronos.engines.names import Apply, SharedVariable, Variable, scalar
from synkhronos.engines.names import tensor as tt
from synkhronos.extensions.steps.arguments import Output
from synkhronos.extensions.steps.definition import Definition
from synkhronos.extensions.steps.errors import TEXTS
from synkhronos.extensions.steps.reduced_expressions import parameters_under

#: Operations through which a sum is followed
_SPLIT = (names.Elemwise, names.Reshape, *names.LINEAR)

Parts = Tuple[Optional[Variable], Optional[Variable]]


def linear_operands(node: Apply | None, local: Dependence) -> Sequence[Variable]:
    """Return the inputs in which the output of a node is linear, with all other inputs constant.

    None of the others depends on the sources of `local`. If no such inputs exist, the result is empty.
    """
    if node is None or graphs.is_fill_of_one_number(node):
        return () if node is None else node.inputs[1:]
    if names.is_sum_with_sparse(node.op):
        return node.inputs
    rule = rule_of(node) if isinstance(node.op, _SPLIT) else None
    used = [place for place, variable in enumerate(node.inputs) if local.of(variable)]
    if rule is None or not rule.is_linear_in(used, len(node.inputs)):
        return ()
    if isinstance(rule.values, Powers):
        return [node.inputs[used[0]]]
    if rule.values.operands not in (None, (0,)):  # they are chosen from
        return ()
    terms = [node.inputs[place] for place in rule.operands(len(node.inputs))]
    is_cast = isinstance(getattr(node.op, "scalar_op", None), scalar.Cast)
    dtypes = [variable.type.dtype for variable in [*node.inputs, *node.outputs] if is_cast]
    return terms if all(dtype.startswith("float") for dtype in dtypes) else ()


def terms(
    variable: Variable, local: Dependence, until_sums: bool = False
) -> Iterator[tuple[Variable, bool]]:
    """Yield ``(term, whether it was summed over an axis)`` for the terms that depend on the sources.

    With `until_sums`, a sum over an axis is a term itself.
    """
    stack = [(variable, False)]
    while stack:
        term, is_summed = stack.pop()
        node = term.owner
        is_sum = node is not None and isinstance(node.op, names.Sum) and node.inputs[0].ndim > 0
        parts = () if until_sums and is_sum else linear_operands(node, local)
        if not parts:
            yield term, is_summed or (until_sums and is_sum)
        else:
            stack.extend([(part, is_summed or is_sum) for part in reversed(parts) if local.of(part)])


def split(variable: Variable, local: Dependence) -> Parts:
    """Return ``(dependent, free)``, whose sum is the variable; either may be None.

    The second does not depend on the sources of `local`. A variable that cannot be divided is dependent.
    """

    def parents(variable: Variable) -> Sequence[Variable]:
        return linear_operands(variable.owner, local) if local.of(variable) else ()

    divided: dict[Variable, Parts] = {}
    for item in inputs_first([variable], parents, done=divided):
        divided[item] = _split(item, parents(item), divided) if local.of(item) else (None, item)
    return divided[variable]


def _split(variable: Variable, operands: Sequence[Variable], divided: Mapping[Variable, Parts]) -> Parts:
    """Return the parts of a dependent variable, given the parts of its linear operands."""
    node = variable.owner
    if all(divided[operand][1] is None for operand in operands):
        return variable, None
    if graphs.is_fill_of_one_number(node):
        return divided[operands[0]]
    kept: Any = divided[operands[0]][1]
    is_elementwise = isinstance(node.op, (names.Elemwise, names.DimShuffle, names.ViewOp))
    # Another operation may depend on the extents of axes that the free part lacks.
    is_single = len(operands) == 1 and not is_elementwise
    if is_single and kept.type.broadcastable != node.inputs[0].type.broadcastable:
        return variable, None
    dependent, free = (_applied(node, operands, divided, which) for which in (0, 1))
    if dependent.type.broadcastable != variable.type.broadcastable:
        dependent = dependent + tt.zeros_like(free)  # which has axes that it lacks
    return dependent, free


def _applied(
    node: Apply, operands: Sequence[Variable], divided: Mapping[Variable, Parts], which: int
) -> Variable:
    """Return the operation with the dependent, or the free parts of its linear operands."""

    def part_of(item: Variable) -> Variable:
        part = divided[item][which] if item in operands else item
        if part is None:
            return tt.constant(numpy.zeros((1,) * item.ndim, item.dtype))
        return names.dense(part)

    inputs = map(part_of, node.inputs)
    return tt.add(*inputs) if names.is_sum_with_sparse(node.op) else node.op(*inputs)


_MEAN, _SUM = frozenset([0.0]), frozenset([1.0])  # the degrees of means and sums over the rows
#: What is wrong with losses of a kind that are combined by an operation
_COMPLAINTS = {
    (_MEAN | _SUM, "avg"): "sum and mean", (_MEAN | _SUM, "sum"): "sum and mean",
    (_SUM, "avg"): "sum averaged", (_MEAN, "sum"): "mean added",
}  # fmt: skip


def check_losses(definition: Definition) -> bool:
    """Warn about the losses of a step that are combined in a way that is not theirs, if any are."""
    found = [] if synk.size() == 1 else list(_complaints(definition))
    for message in found:
        warn(message)
    return bool(found)


def _complaints(definition: Definition) -> Iterator[str]:
    loss_op, losses = definition.reductions.loss_op, definition.reductions.losses
    for loss, degrees in zip(losses, _degrees_of(losses, definition)):
        if (degrees, loss_op) in _COMPLAINTS:
            yield TEXTS[_COMPLAINTS[degrees, loss_op]].format(loss=loss)
        elif degrees not in (_MEAN, _SUM) and loss_op == "avg":  # it may be summed as an output
            for position, output in enumerate(definition.outputs):
                if output.variable is loss and output.op == "sum":
                    yield TEXTS["output added"].format(position=position)


def _degrees_of(losses: Sequence[Variable], definition: Definition) -> list[Any]:
    """Return the degrees of each loss in the rows, or None if they are not known.

    Terms that do not depend on the rows do not count.
    """
    local = Dependence(definition.rows, definition.givens)
    parts = {loss: split(loss, local)[0] for loss in losses if local.of(loss)}
    known = dict(zip(parts, values_of(list(parts.values()), definition)))
    return [_degrees(known.get(loss)) for loss in losses]


def _degrees(value: Rows | None) -> frozenset[float] | None:
    """Return the degrees of a value without an axis of rows."""
    return None if value is None or value.axis is not None else value.degrees


def degrees_and_causes(
    variables: Sequence[Variable], definition: Definition
) -> list[tuple[frozenset[float] | None, Causes]]:
    """Return the degrees of variables in the rows, and why their values on parts of the rows differ.

    The degrees are None if they are not known, or if the variable has rows.
    """
    axes = definition.rows
    causes = difference_causes(list(axes), list(axes.values()), variables)
    return [(_degrees(item), cause) for item, cause in zip(values_of(variables, definition), causes)]


def values_of(variables: Sequence[Variable], definition: Definition) -> list[Rows | None]:
    """Return how variables depend on the number of rows; None where that is not known."""
    known: dict[Variable, Rows | None] = {item: of_input(axis) for item, axis in definition.rows.items()}
    givens = definition.givens
    for variable in inputs_first(variables, graphs.operands_with(givens)) if givens else ():
        if variable in givens and variable not in known:
            [known[variable]] = rows_of(known, [givens[variable]])
    return rows_of(known, variables)


def times(variable: Variable, factor: Variable) -> Variable:
    """Return a variable times a factor, in its type."""
    return names.in_type_of(variable, variable * factor)


class AllRows:
    """The values over all rows of a step, which each rank has as shared variables.

    Attributes
    ----------
    updates : list of (shared, new)
        Updates that each rank makes before it computes gradients.
    """

    def __init__(self, definition: Definition) -> None:
        rows = definition.rows
        self.updates: list[tuple[SharedVariable, Variable]] = []
        if rows:  # A batch of the one that is counted is copied.
            counted = min(rows, key=lambda item: (isinstance(item, SharedVariable), item.type.ndim))
            self._count = tt.cast(counted.shape[rows[counted]], "int64")
        self._total: SharedVariable | None = None

    def forget(self) -> None:
        """Compute none of these values."""
        self.updates, self._total = [], None

    def total(self) -> SharedVariable:
        """Return the number of all rows."""
        if self._total is None:
            self._total = self.sum_of(self._count, "all_rows")
        return self._total

    def share(self, dtype: str) -> Any:
        """Return the number of the rank's rows, over the number of all rows."""
        return tt.cast(self._count, dtype) / tt.cast(self.total(), dtype)

    def sum_of(self, value: Variable, name: str) -> SharedVariable:
        """Return the sum over the ranks of a value."""
        pattern = value.type.broadcastable
        shared = names.shared(numpy.ones((1,) * value.ndim, value.dtype), name, pattern)
        [now] = rebuilt([value], dict(self.updates), {})  # of the values of the same call
        self.updates.append((shared, synk.ops.all_reduce(now, "sum")))
        return shared

    def value_of(self, value: Variable, degrees: frozenset[float] | None) -> Variable | None:
        """Return a sum or a mean over all rows, from those of the ranks' rows; None if it is neither."""
        if degrees == _SUM:
            return self.sum_of(value, "sum_of_rows")
        if degrees != _MEAN:
            return None
        weighted = tt.switch(tt.eq(self._count, 0), 0, value * tt.cast(self._count, value.dtype))
        weighted = names.in_type_of(value, weighted)
        return self.sum_of(weighted, "mean_of_rows") / tt.cast(self.total(), value.dtype)


def with_statistics(definition: Definition, all_rows: AllRows) -> Definition:
    """Return a step whose losses use sums and means over all rows where they are not linear in them.

    The step is returned as it is if this does not make all losses means over the rows, or if the script
    states an operation for what is computed from such a sum or mean.
    """
    losses, rows = definition.reductions.losses, definition.rows
    if definition.reductions.loss_op != "avg" or not losses or not rows:
        return definition
    found = statistics_in(list(rows), list(rows.values()), losses)
    changing = [update.target for update in definition.updates]
    changing += [variable for variable in inputs_first(losses) if graphs.is_random_state(variable)]
    stated = [spec.variable for spec in definition.outputs if spec.has_op]
    stated += [update.new for update in definition.updates if update.has_op]
    is_changed = Dependence(changing, definition.givens).of(*found)
    if not found or is_changed or Dependence(found, definition.givens).of(*stated):
        return definition
    local = Dependence(rows, definition.givens)
    has_collectives = any(
        getattr(item.owner and item.owner.op, "loss_op", None) for item in inputs_first(losses)
    )
    are_floats = all(item.dtype.startswith("float") for item in found)  # else a share has no type
    for has_shares in (True, False) if are_floats else (False,):
        replaced = _of_all_rows(found, definition, all_rows, has_shares)
        made = rebuilt(losses, replaced, {})
        dependent = [part for part, _ in (split(loss, local) for loss in made) if part is not None]
        degrees = {_degrees(value) for value in values_of(dependent, definition)}
        are_sums = degrees == {_SUM} and not has_collectives
        is_mixed = any(item.certain for item in difference_causes(list(rows), list(rows.values()), made))
        outputs = definition.outputs if has_shares else _outputs(definition, replaced)
        if (degrees == {_MEAN} or are_sums) and not is_mixed and outputs is not None:
            reductions = copy.copy(definition.reductions)
            reductions.loss_op = "sum" if are_sums else "avg"
            for loss in losses if are_sums and definition.grad_shared else ():
                reductions.add_gradients_of(loss, parameters_under(loss))  # to find penalties in them
            givens = {**definition.givens, **replaced}
            return definition._replace(outputs=outputs, givens=givens, reductions=reductions)
        all_rows.forget()
    return definition


def _outputs(definition: Definition, replaced: Mapping[Variable, Variable]) -> list[Output] | None:
    """Return the outputs, with the operation of those that are sums if statistics are of all rows.

    The result is None if an output or an update that uses a statistic is neither a sum nor a mean.
    """
    using, outputs = Dependence(replaced, definition.givens), []
    for output in definition.outputs:
        if using.of(output.variable) and not definition.reductions.is_loss(output.variable):
            made = rebuilt([output.variable], replaced, {})
            [(degrees, causes)] = degrees_and_causes(made, definition)
            if degrees not in (_MEAN, _SUM):
                return None
            if degrees == _SUM and causes.possible <= {CONSTANT}:
                output = output._replace(given=(output.variable, "sum"))
        outputs.append(output)
    news = [update.new for update in definition.updates]
    reduced = {item for item in inputs_first(news) if definition.reductions.find(item) is not None}
    return None if Dependence(replaced, definition.givens, reduced).of(*news) else outputs


def _of_all_rows(
    statistics: Sequence[Variable], definition: Definition, all_rows: AllRows, has_shares: bool
) -> dict[Variable, Variable]:
    """Return what replaces statistics in a loss: their values of all rows.

    If `has_shares`, those that are no means are multiplied by the rank's share of the rows.
    """
    local = Dependence(definition.rows, definition.givens)
    whole: dict[Variable, Variable] = {}
    replaced: dict[Variable, Variable] = {}
    for statistic in statistics:
        parts: dict[Variable, Variable] = {}
        for part in dict.fromkeys(item for item, _ in terms(statistic, local, until_sums=True)):
            [own] = rebuilt([part], replaced, {})
            [(degrees, causes)] = degrees_and_causes([own], definition)
            total = None if causes.possible else all_rows.value_of(own, degrees)
            if total is not None:
                parts[part] = names.in_type_of(part, total)
        [new] = rebuilt([statistic], {**whole, **parts}, {})
        [value] = values_of(rebuilt([statistic], replaced, {}), definition)
        is_mean = value is not None and value.degrees == _MEAN
        whole[statistic] = replaced[statistic] = names.in_type_of(statistic, new)
        if has_shares and not is_mean:
            replaced[statistic] = times(whole[statistic], all_rows.share(statistic.dtype))
    return replaced
