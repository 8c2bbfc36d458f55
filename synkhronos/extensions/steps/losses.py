"""Warns about losses whose gradients are added up or averaged, although that is not their kind."""

from __future__ import annotations

from typing import Iterator, Sequence

import synkhronos as synk
from synkhronos._errors import warn
from synkhronos.engines.analysis.graphs import Dependence, inputs_first, operands_with
from synkhronos.engines.analysis.rows import Rows, of_input, rows_of
from synkhronos.engines.names import Variable
from synkhronos.extensions.steps.definition import Definition
from synkhronos.extensions.steps.linear import split

MEAN, SUM, BOTH = "a mean over the rows", "a sum over the rows", "both"

_DIFFERS = "so that the step differs from the serial one"


def check_losses(definition: Definition) -> bool:
    """Warn about the losses of a step that are combined in a way that is not theirs, if any are."""
    found = [] if synk.size() == 1 else list(_complaints(definition))
    for message in found:
        warn(message)
    return bool(found)


def _complaints(definition: Definition) -> Iterator[str]:
    loss_op, losses = definition.reductions.loss_op, definition.reductions.losses
    for loss, kind in zip(losses, kinds_of(losses, definition)):
        if kind == BOTH:
            yield (
                f"loss_op: the loss {loss} adds a sum over the rows and a mean over the rows, of which "
                f"one has to be added up over the ranks and the other averaged, {_DIFFERS}: divide the "
                f"sum by the number of rows, as in losses.mean() or losses.sum() / x.shape[0]"
            )
        elif kind == SUM and loss_op == "avg":
            yield (
                f"loss_op: the loss {loss} is a sum over the rows, perhaps divided by a fixed number, "
                f"and the gradients of the ranks are averaged, {_DIFFERS}: give loss_op='sum', or take "
                f"the mean over the rows"
            )
        elif kind == MEAN and loss_op == "sum":
            yield (
                f"loss_op: the loss {loss} is a mean over the rows, and the gradients of the ranks are "
                f"added up, {_DIFFERS}: leave out loss_op='sum', or take the sum over the rows"
            )
        elif kind is None and loss_op == "avg":
            yield from _complaints_about_output(loss, definition)


def _complaints_about_output(loss: Variable, definition: Definition) -> Iterator[str]:
    """Complain if a loss is summed as an output, and its gradients are averaged."""
    for position, output in enumerate(definition.outputs):
        if output.variable is loss and output.op == "sum":
            yield (
                f"loss_op: outputs[{position}] is a loss, whose values are added up over the ranks, and "
                f"loss_op='avg' averages its gradients, {_DIFFERS}: give loss_op='sum'; if the loss is "
                f"a mean over the rows, leave out the operation of the output"
            )


def kinds_of(losses: Sequence[Variable], definition: Definition) -> list[str | None]:
    """Return, for each loss, `MEAN`, `SUM`, `BOTH`, or None if that is not known.

    Terms that do not depend on the rows do not count.
    """
    local = Dependence(definition.rows, definition.givens)
    parts = {loss: split(loss, local)[0] for loss in losses if local.of(loss)}
    known = dict(zip(parts, values_of(list(parts.values()), definition)))
    return [_kind(known.get(loss)) for loss in losses]


def _kind(value: Rows | None) -> str | None:
    degrees = None if value is None or value.axis is not None else value.degrees
    kinds: dict[frozenset[float] | None, str]
    kinds = {frozenset([0]): MEAN, frozenset([1]): SUM, frozenset([0, 1]): BOTH}
    return kinds.get(degrees)


def values_of(variables: Sequence[Variable], definition: Definition) -> list[Rows | None]:
    """Return how variables depend on the number of rows; None where that is not known."""
    known: dict[Variable, Rows | None] = {item: of_input(axis) for item, axis in definition.rows.items()}
    for variable in inputs_first(variables, operands_with(definition.givens)):
        if variable in definition.givens and variable not in known:
            [known[variable]] = rows_of(known, [definition.givens[variable]])
    return rows_of(known, variables)
