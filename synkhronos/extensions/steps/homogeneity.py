"""Which operations on gradients are homogeneous: twice the gradient gives twice the result.

The graph that a compiler's ``grad`` builds is homogeneous in the gradient of the loss, except for
operations such as ``grad_clip``, which change gradients on purpose. A variable *carries* a gradient if
it is computed from a gradient, and is multiplied by the same number as the gradient.
"""

from __future__ import annotations

from typing import Sequence

import numpy

from synkhronos.engines import names
from synkhronos.engines.names import Apply, DimShuffle, Elemwise, Variable, scalar
from synkhronos.extensions.steps.traversal import follow, nodes_with_steps

_SUMS = (scalar.Add, scalar.Sub, scalar.Maximum, scalar.Minimum)
_SAME = (scalar.Neg, scalar.Identity, scalar.Cast, scalar.Abs, scalar.Second)
_PRODUCTS = (names.Dot, names.BatchedDot, *names.CONVOLUTIONS)
_OTHERS = (*names.BY_ROW, *names.SOFTMAXES)
_PACKAGES = (names.package.__name__, "synkhronos")

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
    return [one for one in node.outputs if is_float(one)]


def kind_of(node: Apply, carrying: set[Variable]) -> str:
    """Return `HOMOGENEOUS`; `SHIFTED`, if something is added to a gradient; `UNKNOWN`; or `OTHER`."""
    op, count = node.op, sum(one in carrying for one in node.inputs)
    if isinstance(op, Elemwise):
        return _of_elements(node, carrying, count)
    if isinstance(op, _PRODUCTS):
        return HOMOGENEOUS if count == 1 else OTHER
    if isinstance(op, names.Scan):
        return _of_steps(node, carrying)
    if isinstance(op, _OTHERS):
        return OTHER
    if not _is_of_the_compiler(op):
        return UNKNOWN
    is_product = isinstance(op, names.CAReduce) and isinstance(op.scalar_op, scalar.Mul)
    return OTHER if is_product else HOMOGENEOUS


def _of_elements(node: Apply, carrying: set[Variable], count: int) -> str:
    operation, inputs = node.op.scalar_op, node.inputs
    if isinstance(operation, _SAME):
        return HOMOGENEOUS
    if isinstance(operation, scalar.Mul):
        return HOMOGENEOUS if count == 1 else OTHER
    if isinstance(operation, scalar.TrueDiv):
        return HOMOGENEOUS if inputs[1] not in carrying else OTHER
    if isinstance(operation, scalar.LogicalComparison):  # with zero it is the same at any scale
        return HOMOGENEOUS if all(one in carrying or _is_zero(one) for one in inputs) else OTHER
    if isinstance(operation, (*_SUMS, scalar.Switch)):
        chooses = isinstance(operation, scalar.Switch)
        if chooses and inputs[0] in carrying:
            return OTHER
        added = inputs[1:] if chooses else inputs
        if all(one in carrying or _is_zero(one) for one in added):
            return HOMOGENEOUS
        return SHIFTED if isinstance(operation, (scalar.Add, scalar.Sub)) else OTHER
    return OTHER


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
    node = variable.owner
    while node is not None:
        if isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, scalar.Second):
            variable = node.inputs[1]
        elif isinstance(node.op, (DimShuffle, names.Alloc)):
            variable = node.inputs[0]
        else:
            return False
        node = variable.owner
    return isinstance(variable, names.Constant) and not numpy.any(variable.data)


def carrying_from(seeds: set[Variable], variables: Sequence[Variable]) -> set[Variable]:
    """Return the variables that carry the gradients of some seeds; parents come before them."""
    carrying = set(seeds)
    follow(variables, carrying, outputs_that_carry)
    return carrying
