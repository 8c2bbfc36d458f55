"""Which operations on gradients are homogeneous: twice the gradient gives twice the result.

The graph that a compiler's ``grad`` builds is homogeneous in the gradient of the loss, except for
operations such as ``grad_clip``, which change gradients on purpose. A variable *carries* a gradient if
it is computed from a gradient, and is multiplied by the same number as the gradient.
"""

from __future__ import annotations

from typing import Sequence

import numpy

from synkhronos.engines import names
from synkhronos.engines.analysis.graphs import follow, nodes_with_steps
from synkhronos.engines.analysis.rules import Terms, rule_of
from synkhronos.engines.names import Apply, Elemwise, Variable, scalar

_PACKAGES = (names.package.__name__, "synkhronos")
_ZERO, _SAME, _ONCE = frozenset[float](), frozenset([0.0]), frozenset([1.0])

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
    rule = rule_of(node)
    if rule is not None and isinstance(rule.values, Terms):
        if all(node.inputs[one] not in carrying for one in rule.operands(len(node.inputs))):
            return ()
    return [one for one in node.outputs if is_float(one)]


def kind_of(node: Apply, carrying: set[Variable]) -> str:
    """Return `HOMOGENEOUS`; `SHIFTED`, if something is added to a gradient; `UNKNOWN`; or `OTHER`."""
    if isinstance(node.op, names.Scan):
        return _of_steps(node, carrying)
    rule = rule_of(node)
    if rule is None:
        return HOMOGENEOUS if _is_of_the_compiler(node.op) else UNKNOWN
    if isinstance(rule.values, Terms) and rule.values.are_alike:  # each item is as it was
        return HOMOGENEOUS
    degrees = rule.degrees([_degrees(one, carrying) for one in node.inputs])
    is_sum = isinstance(getattr(node.op, "scalar_op", None), (scalar.Add, scalar.Sub))
    if degrees == _SAME | _ONCE and is_sum:
        return SHIFTED
    expected = _ONCE if any(outputs_that_carry(node, carrying)) else _SAME
    return HOMOGENEOUS if degrees in (expected, _ZERO) else OTHER


def _degrees(variable: Variable, carrying: set[Variable]) -> frozenset[float]:
    return _ONCE if variable in carrying else _ZERO if _is_zero(variable) else _SAME


def _of_steps(loop: Apply, carrying: set[Variable]) -> str:
    """Return the kind of a loop, in which nothing is shifted after a sum over the rows."""
    found = nodes_with_steps(loop.outputs, carrying, outputs_that_carry)
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


def carrying_from(seeds: set[Variable], variables: Sequence[Variable]) -> set[Variable]:
    """Return the variables that carry the gradients of some seeds; parents come before them."""
    carrying = set(seeds)
    follow(variables, carrying, outputs_that_carry)
    return carrying
