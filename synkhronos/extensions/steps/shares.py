"""Gives operations that change gradients, such as ``grad_clip``, the gradients of the serial loss.

The gradient of a mean over the rows of a rank is larger than the gradient of the mean over all rows: for
one row, by the number of all rows over that of the rank's rows. Averaging over the ranks, weighted by
their rows, corrects this afterwards. An operation that is not homogeneous needs it corrected before.
So what it gets is multiplied by the rank's share of the rows, and what it returns is divided by it.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy

import synkhronos as synk
from synkhronos.engines import names
from synkhronos.engines.names import Apply, SharedVariable, Variable
from synkhronos.engines.names import tensor as tt
from synkhronos.extensions.steps.changes import changes_of
from synkhronos.extensions.steps.dependence import Dependence, rebuilt, with_inputs
from synkhronos.extensions.steps.script import Script


class Shares:
    """Rewrites the gradients of a step.

    Parameters
    ----------
    script : Script
    full : Dependence
        Which variables differ from rank to rank.

    Attributes
    ----------
    counting : list of (shared, new)
        Updates that each rank makes before it computes gradients: they count the rows of all ranks.
    """

    def __init__(self, script: Script, full: Dependence) -> None:
        self._script, self._full = script, full
        self.counting: list[tuple[SharedVariable, Variable]] = []

    def applied(self, gradients: Sequence[Variable], op: str) -> list[Variable]:
        """Return expressions of gradients that are combined by `op`, rewritten where that is needed.

        Raises
        ------
        ValueError
            If an operation changes what is already a sum over the rows of a rank.
        """
        changing, carrying = changes_of(gradients, self._script, self._full)
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

        return rebuilt(gradients, {}, self._script.givens, apply)

    def _share(self, dtype: str) -> Any:
        """Return the number of the rank's rows, over the number of all rows."""
        rows = self._script.rows
        # A batch of it is copied in order to be counted.
        counted = min(rows, key=lambda one: (isinstance(one, SharedVariable), one.type.ndim))
        count = counted.shape[rows[counted]]
        if not self.counting:
            total = names.shared(numpy.ones((), "int64"), "all_rows", ())
            self.counting.append((total, synk.ops.all_reduce(tt.cast(count, "int64"), "sum")))
        return tt.cast(count, dtype) / tt.cast(self.counting[0][0], dtype)


def _times(variable: Variable, factor: Variable) -> Variable:
    return variable.type.filter_variable(tt.cast(variable * factor, variable.dtype))
