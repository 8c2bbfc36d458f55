"""Gives operations that change gradients, such as ``grad_clip``, the gradients of the serial loss.

The gradient of a mean over the rows of a rank is larger than the gradient of the mean over all rows: for
each row, by the number of all rows divided by the number of the rank's rows. The average over the ranks,
weighted by their rows, corrects this afterwards. An operation that is not homogeneous, so that twice the
gradient does not give twice the result, needs the correction before. So its input is multiplied by the
rank's share of the rows, and its output is divided by this share.

Such operations get the gradients of rows, of which each rank has its own. A gradient that is already
the sum over the rows of a rank cannot be changed as the sum over all rows would be.

The graph that a compiler's ``grad`` builds is homogeneous in the gradient of the loss, except for
operations such as ``grad_clip``, which change gradients on purpose. A variable *carries* a gradient if
it is computed from a gradient, and is multiplied by the same number as the gradient.
"""

from __future__ import annotations

from typing import Iterable, Mapping, Sequence

import numpy

from synkhronos.engines import names
from synkhronos.engines.analysis import graphs
from synkhronos.engines.analysis.graphs import Dependence, inputs_first
from synkhronos.engines.analysis.rules import Terms, rule_of
from synkhronos.engines.names import Apply, Elemwise, GradClip, Variable, scalar
from synkhronos.extensions.steps import errors
from synkhronos.extensions.steps.definition import Definition
from synkhronos.extensions.steps.losses import AllRows, terms, times, values_of

_PACKAGES = (names.package.__name__, "synkhronos")
_ZERO, _SAME, _ONCE = (frozenset(degrees) for degrees in ((), (0.0,), (1.0,)))

#: How the output of an operation depends on the gradients that its inputs carry.
HOMOGENEOUS, SHIFTED, UNKNOWN, OTHER = "homogeneous", "shifted", "unknown", "other"


def is_float(variable: Variable) -> bool:
    """Whether a variable is a dense tensor of floats."""
    dtype = getattr(variable.type, "dtype", "")
    return hasattr(variable.type, "broadcastable") and dtype.startswith(("float", "complex"))


def outputs_that_carry(node: Apply, carrying: set[Variable]) -> Sequence[Variable]:
    """Return the outputs of a node that carry a gradient, given the variables that do.

    An output that is not a float, such as a shape or a comparison, carries no gradient.
    """
    if isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, scalar.Second):
        return node.outputs if node.inputs[1] in carrying else ()
    return [output for output in node.outputs if is_float(output)]


def kind_of(node: Apply, carrying: set[Variable]) -> str:
    """Return `HOMOGENEOUS`; `SHIFTED`, if something is added to a gradient; `UNKNOWN`; or `OTHER`."""
    if isinstance(node.op, names.Scan):
        return _of_steps(node, carrying)
    rule = rule_of(node)
    if rule is None:
        return HOMOGENEOUS if _is_of_the_compiler(node.op) else UNKNOWN
    if isinstance(rule.values, Terms) and rule.values.are_alike:  # each item is as it was
        return HOMOGENEOUS
    degrees = rule.degrees([_degrees(variable, carrying) for variable in node.inputs])
    if degrees == _SAME | _ONCE and rule.values == Terms():
        return SHIFTED
    expected = _ONCE if outputs_that_carry(node, carrying) else _SAME
    return HOMOGENEOUS if degrees in (expected, _ZERO) else OTHER


def _degrees(variable: Variable, carrying: set[Variable]) -> frozenset[float]:
    return _ONCE if variable in carrying else _ZERO if _is_zero(variable) else _SAME


def _of_steps(loop: Apply, carrying: set[Variable]) -> str:
    """Return the kind of a loop, in which nothing is shifted after a sum over the rows."""
    found = graphs.nodes_having(loop.outputs, carrying, outputs_that_carry)
    kinds = {
        kind_of(node, inner)
        for node, inner in found
        if not isinstance(node.op, names.Scan) and not inner.isdisjoint(node.inputs)
    }
    return next((kind for kind in (OTHER, UNKNOWN) if kind in kinds), HOMOGENEOUS)


def _is_of_the_compiler(op: names.Op) -> bool:
    """Whether an operation is from the compiler or the library, and is not a graph of the script's."""
    is_graph = hasattr(op, "local_inputs") or hasattr(op, "fgraph")
    return type(op).__module__.partition(".")[0] in _PACKAGES and not is_graph


def _is_zero(variable: Variable) -> bool:
    """Whether a variable is a constant zero, repeated perhaps."""
    while variable.owner is not None:
        node = variable.owner
        is_fill = isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, scalar.Second)
        if not is_fill and not isinstance(node.op, (names.DimShuffle, names.Alloc)):
            return False
        variable = node.inputs[is_fill]
    return isinstance(variable, names.Constant) and not numpy.any(variable.data)


def scaled(
    gradients: Sequence[Variable], op: str, definition: Definition, full: Dependence, all_rows: AllRows
) -> list[Variable]:
    """Return gradients that are combined by `op`, scaled where operations change them.

    Parameters
    ----------
    gradients : list of variables
        Expressions of gradients.
    op : str
    definition : Definition
        The step.
    full : Dependence
        Which variables differ from rank to rank.
    all_rows : AllRows
        Counts the rows of all ranks.

    Raises
    ------
    ValueError
        If an operation changes a gradient that is already a sum over the rows of a rank.
    """
    changes = _Changes(gradients, definition, full)
    changing, carrying = changes.nodes, changes.carrying
    if op != "avg" or not changing:
        return list(gradients)

    def apply(node: Apply, inputs: list[Variable]) -> list[Variable]:
        if node not in changing:
            return graphs.with_inputs(node, inputs)
        scaled = [
            times(new, all_rows.share(new.dtype)) if old in carrying else new
            for old, new in zip(node.inputs, inputs)
        ]
        outputs = graphs.with_inputs(node, scaled)
        return [
            times(new, 1 / all_rows.share(new.dtype)) if old in carrying else new
            for old, new in zip(node.outputs, outputs)
        ]

    return graphs.rebuilt(gradients, {}, definition.givens, apply)


class _Changes:
    """Where operations change gradients.

    Parameters
    ----------
    gradients : list of variables
        Expressions of gradients.
    definition : Definition
        The step.
    full : Dependence
        Which variables differ from rank to rank.

    Attributes
    ----------
    nodes : set
        The nodes that change gradients of rows, or the results of other such nodes.
    carrying : set of variables
        The variables that carry gradients.

    Raises
    ------
    ValueError
        If an operation changes a gradient that is already a sum over the rows of a rank.
    """

    def __init__(self, gradients: Sequence[Variable], definition: Definition, full: Dependence) -> None:
        self._definition, parents = definition, graphs.operands_with(definition.givens)
        seeds = graphs.gradient_seeds(gradients, parents)
        self._order = list(inputs_first(gradients, lambda item: () if item in seeds else parents(item)))
        self.carrying: set[Variable] = set(seeds)
        self.nodes: set[Apply] = set()
        every = list(graphs.nodes_having(self._order, self.carrying, outputs_that_carry))
        self._nodes = [node for node, having in every if having is self.carrying]
        self._kinds: dict[Apply, tuple[str, list[Variable]]] = {}
        for node in self._nodes:
            operands = [item for item in node.inputs if item in self.carrying and full.of(item)]
            kind = kind_of(node, self.carrying) if operands else HOMOGENEOUS
            if kind != HOMOGENEOUS:  # a value that is the same on every rank stays the same
                self._kinds[node] = kind, operands
        if self._kinds:
            _check_parameters(seeds.values(), definition)
            self._find(self._sums(seeds.values()))

    def _find(self, is_sum: Mapping[Variable, bool | None]) -> None:
        """Find the nodes, given which operands are sums over the rows."""
        changed: set[Variable] = set()
        for node in self._nodes:
            kind, operands = self._kinds.get(node, (HOMOGENEOUS, []))
            sums = [is_sum[operand] for operand in operands]
            if kind == OTHER and True in sums:
                raise errors.refusal("changed after sum", op=node.op)
            changes = kind != HOMOGENEOUS and True not in sums
            if kind == SHIFTED and changes:  # the average of sums that are shifted is shifted alike
                changes = None not in sums or not changed.isdisjoint(operands)
            if changes:
                self.nodes.add(node)
            if changes or not changed.isdisjoint(node.inputs):
                changed.update(node.outputs)

    def _sums(self, losses: Iterable[Variable]) -> dict[Variable, bool | None]:
        """Return whether each operand is a sum over the rows, or has an axis of rows, or None."""
        reductions = self._definition.reductions
        numbers = {number for loss in losses for number in reductions.numbers_of_gradients(loss)}
        found: set[Variable] = set()
        for item in self._order:
            if item in self.carrying:
                above = [each for each in graphs.operands(item) if each in self.carrying]
                if (above and found.issuperset(above)) or reductions.numbering.of(item) in numbers:
                    found.add(item)
        operands = list(dict.fromkeys(item for _, each in self._kinds.values() for item in each))
        values = zip(operands, values_of(operands, self._definition))
        return {
            item: True if item in found else None if value is None else value.axis is None
            for item, value in values
        }


def _check_parameters(losses: Iterable[Variable], definition: Definition) -> None:
    """Raise an error if gradients of terms that do not depend on the rows are clipped."""
    rows = Dependence(definition.rows, definition.givens)
    parents = graphs.operands_with(definition.givens)
    for loss in losses:
        for term, _ in terms(loss, rows):
            order = list(inputs_first([term], parents))
            having = {variable for variable in order if rows.of(variable)}
            for node, inner in graphs.nodes_having(order, having, lambda node, having: node.outputs):
                if isinstance(node.op, GradClip) and node.inputs[0] not in inner:
                    raise errors.refusal("changed after sum", op=node.op)
