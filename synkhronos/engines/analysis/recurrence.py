"""Loops along the rows that compute each step from earlier steps.

If the ranks have different rows, such a loop starts again on each of them. A loop that only adds up, or
only keeps the greatest or least value, does not count: its last step is a sum, or a maximum, over the
rows. The gradient of any loop with respect to a variable that all steps use is such a sum.
"""

from __future__ import annotations

from typing import AbstractSet, Sequence

from synkhronos.engines.analysis.row_axes import RowAxes
from synkhronos.engines.analysis.rows import LENGTH
from synkhronos.engines.analysis.shapes import constant_index
from synkhronos.engines.base import BOUND
from synkhronos.engines.names import (
    Apply,
    Elemwise,
    Scan,
    Shape,
    Shape_i,
    Subtensor,
    Variable,
    ancestors,
    io_toposort,
    scalar,
    steps_of,
)

_FOLDS = (scalar.Add, scalar.Mul, scalar.Maximum, scalar.Minimum, scalar.AND, scalar.OR)


def recurrent(
    arguments: Sequence[Variable], axes: Sequence[int | str | None], results: Sequence[Variable]
) -> list[int]:
    """Return the positions of the arguments along whose rows a loop depends on earlier steps.

    Parameters
    ----------
    arguments : list of variables
    axes : list
        As of `Engine.analyze`.
    results : list of variables
    """
    nodes = io_toposort(arguments, results)
    if not any(isinstance(node.op, Scan) for node in nodes):
        return []
    uses = _Uses(nodes, results)
    loops = {node for node in nodes if isinstance(node.op, Scan) and _is_recurrence(node, uses)}
    found = []
    for axis in range(len(arguments)) if loops else ():
        if axes[axis] is not None and _runs_along(loops, nodes, arguments, axes, axis):
            found.append(axis)
    return found


def _runs_along(
    loops: set[Apply],
    nodes: Sequence[Apply],
    arguments: Sequence[Variable],
    axes: Sequence[int | str | None],
    position: int,
) -> bool:
    """Whether one of the loops runs along the rows of an argument, or between the bounds of rows."""
    kept: list[int | str | None]
    kept = [axis if axis == BOUND == axes[position] else None for axis in axes]
    kept[position] = axes[position]
    graph = RowAxes(dict(zip(arguments, kept)))
    for node in nodes:
        graph.add(node)
        if node in loops:
            sequences = node.op.outer_seqs(node.inputs)
            values = [graph.value(one) for one in sequences]
            if any(value is not None and value.axis == 0 for value in values):
                return True
            if not sequences and graph.value(node.inputs[0]) == LENGTH:
                return True
    return False


class _Uses:
    """Where the variables of a graph are used."""

    def __init__(self, nodes: Sequence[Apply], results: Sequence[Variable]) -> None:
        self._results = set(results)
        self._nodes: dict[Variable, list[Apply]] = {}
        for node in nodes:
            for one in node.inputs:
                self._nodes.setdefault(one, []).append(node)

    def is_last_only(self, variable: Variable) -> bool:
        """Whether only the last item of a variable is used."""
        if variable in self._results:
            return False
        return all(self._takes_last(node, variable) for node in self._nodes.get(variable, ()))

    def _takes_last(self, node: Apply, variable: Variable) -> bool:
        if isinstance(node.op, (Shape, Shape_i, Scan)):  # a loop that uses each step is a gradient
            return True
        if isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, scalar.Second):
            return node.inputs[1] is not variable
        if not isinstance(node.op, Subtensor):
            return False
        chosen = constant_index(node)[0]
        return chosen == -1 or (isinstance(chosen, slice) and self.is_last_only(node.outputs[0]))


def _is_recurrence(node: Apply, uses: _Uses) -> bool:
    """Whether a loop depends on earlier steps other than by folding."""
    op = node.op
    inner_inputs, inner_outputs = steps_of(op)
    # A loop with other states, of several taps in both directions, is the gradient of such a loop.
    taps = set(op.inner_mitsot(inner_inputs))
    states = op.inner_sitsot(inner_inputs)
    earlier = taps.union(states)
    news = op.inner_sitsot_outs(inner_outputs)
    others = [*op.inner_mitsot_outs(inner_outputs), *op.inner_nitsot_outs(inner_outputs)]
    if any(_depends(one, earlier) for one in others):
        return True
    kept = op.outer_sitsot_outs(node.outputs)
    return any(
        _depends(new, earlier) and not (_is_fold(new, state, earlier) and uses.is_last_only(all_steps))
        for state, new, all_steps in zip(states, news, kept)
    )


def _depends(variable: Variable, sources: AbstractSet[Variable]) -> bool:
    return not sources.isdisjoint(ancestors([variable]))


def _is_fold(new: Variable, state: Variable, earlier: AbstractSet[Variable]) -> bool:
    """Whether a single operation combines the old state with values that do not depend on old states."""
    kind = None
    while new is not state:
        node = new.owner
        scalar_op = getattr(node and node.op, "scalar_op", None)
        if not isinstance(scalar_op, (scalar.Cast, scalar.Identity)):
            if not isinstance(scalar_op, _FOLDS) or kind not in (None, type(scalar_op)):
                return False
            kind = type(scalar_op)
        operands = [one for one in node.inputs if _depends(one, earlier)]
        if len(operands) != 1:
            return False
        [new] = operands
    return True
