"""On which inputs the results of a function depend, and along which of them a loop runs.

If the ranks have different rows, a loop along the rows that computes each step from earlier steps starts
again on each of them. A loop that only adds up, or only keeps the greatest or least value, does not
count: its last step is a sum, or a maximum, over the rows. The gradient of any loop with respect to a
variable that all steps use is such a sum.
"""

from __future__ import annotations

from typing import Any, Sequence

from synkhronos.engines import names
from synkhronos.engines.analysis.graphs import Dependence, loss_ops
from synkhronos.engines.analysis.rows import LENGTH, RowAxes, extents
from synkhronos.engines.analysis.rules import Choice, Terms, rule_of
from synkhronos.engines.analysis.shapes import constant_index
from synkhronos.engines.base import BOUND, Analysis, Sources
from synkhronos.engines.collectives import BucketReady, Collective, is_peers
from synkhronos.engines.names import Apply, SharedVariable, Variable, io_toposort, scalar

_FOLDS = (scalar.Add, scalar.Mul, scalar.Maximum, scalar.Minimum, scalar.AND, scalar.OR)


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
    inputs = [spec.variable for spec in specifications]
    updates = [(spec.variable, spec.update) for spec in specifications if spec.update is not None]
    arguments, results = arguments_and_results(specifications, outputs)
    nodes = io_toposort(inputs, results)
    equal = {
        output
        for node in nodes
        if isinstance(node.op, Collective) and node.op.is_same_everywhere
        for output in node.outputs
    }
    sources = [variable for variable in inputs if not is_peers(variable)]
    every, own = Dependence(sources, {}), Dependence(sources, {}, equal)
    divided = {argument for argument, axis in zip(arguments, axes) if axis is not None}

    def sources_of(result: Variable) -> Sources:
        used, used_alone = (each.sources_in(each.of(result)) for each in (every, own))
        shareds, own_shareds = (
            frozenset(item for item in each if isinstance(item, SharedVariable))
            for each in (used, used_alone)
        )
        return Sources(shareds, own_shareds, not divided.isdisjoint(used_alone))

    return Analysis(
        outputs=[sources_of(output) for output in outputs],
        updates={shared: sources_of(new) for shared, new in updates},
        accumulated=frozenset(shared for shared, new in updates if _accumulates(shared, new, every)),
        extents=extents(arguments, axes, outputs),
        loss_ops=loss_ops(nodes, outputs),
    )


def arguments_and_results(
    specifications: Sequence[Any], outputs: Sequence[Variable]
) -> tuple[list[Variable], list[Variable]]:
    """Return the arguments of a function, without the peers, and all of its results."""
    inputs = [spec.variable for spec in specifications]
    arguments = [item for item in inputs if not isinstance(item, SharedVariable) and not is_peers(item)]
    return arguments, [*outputs, *(spec.update for spec in specifications if spec.update is not None)]


def _accumulates(shared: SharedVariable, new: Variable, every: Dependence) -> bool:
    """Whether the old value enters the new value only elementwise: in sums, multiples, or as a part."""
    own = every.mask_of([shared])
    waiting, seen = [new], set()
    while waiting:
        variable = waiting.pop()
        if variable is shared or variable in seen or not every.of(variable) & own:
            continue
        seen.add(variable)
        node = variable.owner
        using = [place for place, item in enumerate(node.inputs) if every.of(item) & own]
        rule = rule_of(node)
        is_joined = rule is not None and isinstance(rule.values, Terms) and rule.values.are_alike
        if rule is None or not is_joined and (rule.reduced or [*rule.mixed]):
            if not isinstance(node.op, BucketReady):
                return False
        elif not isinstance(rule.values, Choice) and not rule.is_linear_in(using, len(node.inputs)):
            return False
        waiting.extend(node.inputs[place] for place in using)
    return True


# Loops


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
    if not any(isinstance(node.op, names.Scan) for node in nodes):
        return []
    uses = _Uses(nodes, results)
    loops = {node for node in nodes if isinstance(node.op, names.Scan) and _is_recurrence(node, uses)}

    def is_along(position: int) -> bool:
        """Whether one of the loops runs along the rows of an argument, or between the bounds of rows."""
        kept: list[int | str | None]
        kept = [axis if axis == BOUND == axes[position] else None for axis in axes]
        kept[position] = axes[position]
        graph = RowAxes(dict(zip(arguments, kept)))
        for node in nodes:
            graph.add(node)
            if node in loops:
                sequences = node.op.outer_seqs(node.inputs)
                values = [graph.value(sequence) for sequence in sequences]
                if any(value is not None and value.axis == 0 for value in values):
                    return True
                if not sequences and graph.value(node.inputs[0]) == LENGTH:
                    return True
        return False

    positions = [position for position, axis in enumerate(axes) if axis is not None]
    return [position for position in positions if loops and is_along(position)]


class _Uses:
    """Where the variables of a graph are used."""

    def __init__(self, nodes: Sequence[Apply], results: Sequence[Variable]) -> None:
        self._results = set(results)
        self._nodes: dict[Variable, list[Apply]] = {}
        for node in nodes:
            for variable in node.inputs:
                self._nodes.setdefault(variable, []).append(node)

    def is_last_only(self, variable: Variable) -> bool:
        """Whether only the last item of a variable is used."""
        if variable in self._results:
            return False
        return all(self._takes_last(node, variable) for node in self._nodes.get(variable, ()))

    def _takes_last(self, node: Apply, variable: Variable) -> bool:
        # A loop that uses each step is a gradient.
        if isinstance(node.op, (names.Shape, names.Shape_i, names.Scan)):
            return True
        if isinstance(node.op, names.Elemwise) and isinstance(node.op.scalar_op, scalar.Second):
            return node.inputs[1] is not variable
        if not isinstance(node.op, names.Subtensor):
            return False
        chosen = constant_index(node)[0]
        return chosen == -1 or (isinstance(chosen, slice) and self.is_last_only(node.outputs[0]))


def _is_recurrence(node: Apply, uses: _Uses) -> bool:
    """Whether a loop depends on earlier steps other than by folding."""
    op = node.op
    inner_inputs, inner_outputs = names.steps_of(op)
    # A loop with other states, of several taps in both directions, is the gradient of such a loop.
    taps = set(op.inner_mitsot(inner_inputs))
    states = op.inner_sitsot(inner_inputs)
    earlier = Dependence([*taps, *states], {})
    news = op.inner_sitsot_outs(inner_outputs)
    others = [*op.inner_mitsot_outs(inner_outputs), *op.inner_nitsot_outs(inner_outputs)]
    if earlier.of(*others):
        return True
    kept = op.outer_sitsot_outs(node.outputs)
    return any(
        earlier.of(new) and not (_is_fold(new, state, earlier) and uses.is_last_only(all_steps))
        for state, new, all_steps in zip(states, news, kept)
    )


def _is_fold(new: Variable, state: Variable, earlier: Dependence) -> bool:
    """Whether a single operation combines the old state with values that do not depend on old states."""
    kind = None
    while new is not state:
        node = new.owner
        scalar_op = getattr(node and node.op, "scalar_op", None)
        if not isinstance(scalar_op, (scalar.Cast, scalar.Identity)):
            if not isinstance(scalar_op, _FOLDS) or kind not in (None, type(scalar_op)):
                return False
            kind = type(scalar_op)
        operands = [variable for variable in node.inputs if earlier.of(variable)]
        if len(operands) != 1:
            return False
        [new] = operands
    return True
