"""Values over all rows that ranks need before they compute gradients: their number, and sums and means.

A loss such as ``(errors * mask).sum() / mask.sum()`` divides by a sum over the rows. Each rank would
divide by the sum over its own rows, so the average of the ranks is not the loss of all rows. The sum of
the mask depends on no parameter. So it is added up over the ranks before, and in its place each rank
uses its share of it by the number of its rows, with which the average is exact.
"""

from __future__ import annotations

from typing import Any

import numpy

import synkhronos as synk
from synkhronos.engines import names
from synkhronos.engines.analysis.difference_causes import difference_causes, statistics_in
from synkhronos.engines.analysis.graphs import Dependence, inputs_first, is_random_state, rebuilt
from synkhronos.engines.analysis.rows import Rows, of_input, rows_of
from synkhronos.engines.names import SharedVariable, Variable
from synkhronos.engines.names import tensor as tt
from synkhronos.extensions.steps.definition import Definition
from synkhronos.extensions.steps.linear import terms

_MEAN, _SUM = frozenset([0.0]), frozenset([1.0])


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
            counted = min(rows, key=lambda one: (isinstance(one, SharedVariable), one.type.ndim))
            self._count = tt.cast(counted.shape[rows[counted]], "int64")
        self._total: SharedVariable | None = None

    def total(self) -> SharedVariable:
        """Return the number of all rows."""
        if self._total is None:
            self._total = self.sum_of(self._count, "all_rows")
        return self._total

    def share(self, dtype: str) -> Any:
        """Return the number of the rank's rows, over the number of all rows."""
        return tt.cast(self._count, dtype) / tt.cast(self.total(), dtype)

    def sum_of(self, value: Variable, name: str) -> SharedVariable:
        """Return the sum over the ranks of a value of one element."""
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
        weighted = value.type.filter_variable(tt.cast(weighted, value.dtype))
        return self.sum_of(weighted, "mean_of_rows") / tt.cast(self.total(), value.dtype)


def with_statistics(definition: Definition, all_rows: AllRows) -> Definition:
    """Return a step whose losses use sums and means over all rows where they are not linear in them.

    The step is returned as it is if this does not make all losses means over the rows, or if the script
    states an operation for what is computed from such a sum or mean.
    """
    losses, rows = definition.reductions.losses, definition.rows
    if definition.reductions.loss_op != "avg" or not losses or not rows:
        return definition
    inputs, axes = list(rows), list(rows.values())
    found = statistics_in(inputs, axes, losses)
    changing = [update.target for update in definition.updates]
    changing += [variable for variable in inputs_first(losses) if is_random_state(variable)]
    changing_ones = Dependence(changing, definition.givens)
    if not found or changing_ones.of(*found) or not all(all(item.type.broadcastable) for item in found):
        return definition
    n_before, local = len(all_rows.updates), Dependence(rows, definition.givens)
    known: dict[Variable, Rows | None] = {item: of_input(axis) for item, axis in rows.items()}
    replaced: dict[Variable, Variable] = {}
    for statistic in found:
        parts: dict[Variable, Variable] = {}
        for part in dict.fromkeys(item for item, _ in terms(statistic, local, until_sums=True)):
            [own] = rebuilt([part], replaced, {})
            [value], [causes] = rows_of(known, [own]), difference_causes(inputs, axes, [own])
            is_exact = value is not None and not causes.possible
            total = all_rows.value_of(own, value.degrees) if is_exact and value is not None else None
            if total is not None:
                parts[part] = part.type.filter_variable(tt.cast(total, part.dtype))
        [new] = rebuilt([statistic], {**replaced, **parts}, {})
        [value] = rows_of(known, rebuilt([statistic], replaced, {}))
        if value is not None and value.degrees != _MEAN:
            new = new * all_rows.share(statistic.dtype)
        replaced[statistic] = statistic.type.filter_variable(tt.cast(new, statistic.dtype))
    made = rebuilt(losses, replaced, {})
    are_means = all(row is not None and row.degrees == _MEAN for row in rows_of(known, made))
    stated = [spec.variable for spec in definition.outputs if spec.has_op]
    stated += [update.new for update in definition.updates if update.has_op]
    is_stated = bool(Dependence(found, definition.givens).of(*stated))
    if not are_means or is_stated or any(item.certain for item in difference_causes(inputs, axes, made)):
        del all_rows.updates[n_before:]
        return definition
    return definition._replace(givens={**definition.givens, **replaced})
