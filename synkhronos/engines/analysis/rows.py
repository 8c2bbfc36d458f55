"""How the values of a graph depend on the number of rows, as far as its operations show.

Suppose that every row of the data occurs twice. A mean over the rows stays the same, a sum over the rows
doubles, and so does the number of rows. The *degree* of a term is the power of two that it is multiplied
by: 0 for a mean, 1 for a sum, -1 for a value that is divided by the number of rows. A value may also
have an axis of rows. Both follow from the operations, node by node: the degrees of factors are added,
and a sum over the axis of rows adds one. So ``(x * w).sum() / x.shape[0]`` has the degree 0, however it
is written, and so has the gradient of a mean.

The result of an operation that is not listed here is unknown, unless none of its inputs depends on the
number of rows. Known results are certain; an output is never taken for a sum by mistake.
"""

from __future__ import annotations

from typing import AbstractSet, Any, Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos.engines import names
from synkhronos.engines.analysis.shapes import (
    TRANSFERS,
    axis_after,
    constant_index,
    dims,
    item,
    normalized_axes,
    without_axes,
)
from synkhronos.engines.base import BOUND, PARTLY_SUM, ROWS, SUM
from synkhronos.engines.names import Apply, Constant, Reciprocal, Variable, io_toposort, scalar

_MOST = 4  # a value with more degrees counts as unknown
_SAME = (scalar.Neg, scalar.Cast, scalar.Identity)
_SUMS = (scalar.Add, scalar.Sub)
_CHOICES = (scalar.Maximum, scalar.Minimum)


class Rows(NamedTuple):
    """How a value depends on the number of rows.

    Attributes
    ----------
    axis : int or None
        The axis of rows.
    degrees : frozenset of int or float
        The degrees of its terms; empty if it is zero.
    """

    axis: int | None
    degrees: frozenset[float]

    def times(self, other: Rows) -> frozenset[float]:
        """Return the degrees of the product with another value."""
        return frozenset(one + two for one in self.degrees for two in other.degrees)


ZERO, FIXED, LENGTH = (Rows(None, frozenset(degrees)) for degrees in ((), (0,), (1,)))


def extents(
    inputs: Sequence[Variable], axes: Sequence[int | str | None], outputs: Sequence[Variable]
) -> list[str | None]:
    """Return `SUM`, `PARTLY_SUM`, `ROWS` or None for each output.

    Parameters
    ----------
    inputs : list of variables
    axes : list of int, None or `BOUND`
        The axis of each input along which its rows are split.
    outputs : list of variables
    """
    graph = RowGraph(dict(zip(inputs, axes)))
    return [_extent(value) for value in graph.values_of(outputs)]


def of_input(axis: int | None) -> Rows:
    """Return the `Rows` of an input with an axis of rows; None if it has none."""
    return FIXED if axis is None else Rows(axis, FIXED.degrees)


def rows_of(known: Mapping[Variable, Rows | None], variables: Sequence[Variable]) -> list[Rows | None]:
    """Return the `Rows` of variables, or None where they are not known.

    Parameters
    ----------
    known : dict
        The `Rows` of inputs, or of other variables of the graph. Variables without inputs are fixed.
    variables : list of variables
    """
    return RowGraph({}, known).values_of(variables)


def _extent(value: Rows | None) -> str | None:
    if value is None:
        return None
    if value.axis is not None:
        return ROWS
    if value.degrees == {1}:
        return SUM
    return PARTLY_SUM if value.degrees == {0, 1} else None


class RowGraph:
    """The `Rows` of the variables of a graph; None if they are unknown.

    Parameters
    ----------
    axes : dict
        The axis of the rows of each input, None or `BOUND`.
    known : dict, optional
        The `Rows` of other variables.
    """

    def __init__(
        self,
        axes: Mapping[Variable, int | str | None],
        known: Mapping[Variable, Rows | None] | None = None,
    ) -> None:
        given = {one: of_input(axis) for one, axis in axes.items() if not isinstance(axis, str)}
        self._values = {**(known or {}), **given}
        self._bounds = {one for one, axis in axes.items() if axis == BOUND}

    def values_of(self, variables: Sequence[Variable]) -> list[Rows | None]:
        """Return the values of variables, after finding those of the graph."""
        for node in io_toposort([*self._values, *self._bounds], variables):
            self.add(node)
        return [self.value(one) for one in variables]

    def value(self, variable: Variable) -> Rows | None:
        if variable in self._values:
            return self._values[variable]
        if variable.owner is not None:
            return None
        data = getattr(variable, "data", None)  # of a constant
        is_zero = isinstance(data, (np.ndarray, np.generic, int, float)) and not np.any(data)
        return ZERO if isinstance(variable, Constant) and is_zero else FIXED

    def add(self, node: Apply) -> None:
        """Find the values of the outputs of a node, whose inputs have been found."""
        found = self._apply(node, [self.value(one) for one in node.inputs])
        for output in node.outputs:
            self._values.setdefault(output, found)

    def _apply(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        op = node.op
        for kinds, rule in _RULES:
            if isinstance(op, kinds):
                return getattr(self, rule)(node, values)
        if type(op).__name__ in TRANSFERS:
            return values[0]
        return of_unlisted(values)

    def dims(self, shape: Variable) -> list[int | Rows | None] | None:
        return dims(shape, self.value, self._extents)

    def _extents(self, variable: Variable) -> list[Rows] | None:
        value = self.value(variable)
        if value is None:
            return None
        return [LENGTH if axis == value.axis else FIXED for axis in range(variable.ndim)]

    def item(self, number: Variable) -> int | Rows | None:
        return item(number, self.value)

    # Rules: each returns the value of all outputs of a node

    def elementwise(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        return _elementwise(node.op.scalar_op, values, node.inputs)

    def reduction(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        (value,), op = values, node.op
        items = self.dims(node.inputs[0])
        if items is not None and isinstance(op.scalar_op, scalar.Mul):  # the size of an array
            return None if None in items else Rows(None, frozenset([items.count(LENGTH)]))
        if value is None:
            return None
        axes = normalized_axes(op.axis, node.inputs[0].ndim)
        axis = value.axis
        is_sum = isinstance(op.scalar_op, scalar.Add)
        if axis is not None and axis in axes:
            added = 0 if isinstance(op, names.MEANS) else 1
            return _raised(value.degrees, added) if is_sum else None
        return Rows(without_axes(axis, axes), value.degrees) if is_sum or value.degrees <= {0} else None

    def largest(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        (value,) = values[:1]
        if value is None or not value.degrees <= {0}:
            return None
        axes = normalized_axes(node.op.axis, node.inputs[0].ndim)
        if value.axis in axes:
            return None
        return Rows(without_axes(value.axis, axes), FIXED.degrees)

    def dimshuffle(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        (value,) = values
        if value is None or value.axis is None:
            return value
        if value.axis not in node.op.new_order:  # removed, as its extent is expected to be 1
            return None
        return Rows(node.op.new_order.index(value.axis), value.degrees)

    def dot(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        known = all_known(values)
        if known is None:
            return None
        (a, b), (left, right) = known, node.inputs
        summed_in_a = a.axis is not None and a.axis == left.ndim - 1
        summed_in_b = b.axis is not None and b.axis == max(right.ndim - 2, 0)
        degrees = a.times(b)
        if summed_in_a and summed_in_b:
            return _raised(degrees, 1)
        if summed_in_a or summed_in_b or None not in (a.axis, b.axis):
            return None
        if b.axis is not None:
            return Rows(left.ndim - 1, degrees)
        return Rows(a.axis, degrees)

    def batched_dot(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        known = all_known(values)
        if known is None or [value.axis for value in known] != [0, 0]:
            return of_unlisted(values)
        return Rows(0, known[0].times(known[1]))

    def convolution(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        known = all_known(values)
        if known is None or known[0].axis != 0 or known[1].axis is not None:
            return of_unlisted(values)
        return Rows(0, known[0].times(known[1]))

    def by_row(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        known = all_known(values)
        if known is None or known[0].axis != 0 or not all(one.degrees <= {0} for one in known):
            return of_unlisted(values)
        return Rows(0, FIXED.degrees)

    def softmax(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        value, axes = values[0], normalized_axes(node.op.axis, node.inputs[0].ndim)
        if value is None or value.axis in axes:
            return of_unlisted(values)
        return Rows(value.axis, FIXED.degrees) if value.degrees <= {0} else None

    def linear_by_row(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        known = all_known(values)
        if known is None or known[0].axis != 0:
            return of_unlisted(values)
        return Rows(0, known[0].degrees)

    def pooling(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        return self.by_row(node, values) if node.inputs[0].ndim > node.op.ndim else of_unlisted(values)

    def reshape(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        value, shape = values[0], self.dims(node.inputs[1])
        if value is None or not shape:
            return of_unlisted(values)
        rest_is_fixed = all(isinstance(one, int) or one == FIXED for one in shape[1:])
        if value.axis is None:
            return value if rest_is_fixed and (isinstance(shape[0], int) or shape[0] == FIXED) else None
        if value.axis == 0 and (shape[0] == LENGTH or shape[0] == -1) and rest_is_fixed:
            return Rows(0, value.degrees)
        return None

    def alloc(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        shape = [self.item(one) for one in node.inputs[1:]]
        if values[0] is None or values[0].axis is not None or None in shape:
            return None
        return self._filled(shape, values[0].degrees)

    def random(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        shape = self.dims(node.inputs[1])
        if shape is None or None in shape:
            return of_unlisted(values)
        known = all(one is not None and one.degrees <= {0} for one in values[2:])
        return self._filled(shape, FIXED.degrees) if known else None

    def _filled(self, shape: Sequence[int | Rows | None], degrees: frozenset[float]) -> Rows | None:
        axes = [axis for axis, one in enumerate(shape) if one == LENGTH]
        if len(axes) > 1 or any(one not in (LENGTH, FIXED) for one in shape if not isinstance(one, int)):
            return None
        return Rows(axes[0] if axes else None, degrees)

    def shape_item(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        if values[0] is None:
            return None
        return LENGTH if values[0].axis == node.op.i else FIXED

    def indexed(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        chosen = constant_index(node)
        items = self.dims(node.inputs[0])
        if items is not None and len(chosen) == 1 and isinstance(chosen[0], int):
            one = items[chosen[0]] if -len(items) <= chosen[0] < len(items) else None
            return FIXED if isinstance(one, int) else one
        value = values[0]
        if value is not None and value.axis is None:
            for axis, one in enumerate(chosen):
                if self._is_window(one):
                    return Rows(axis_after(axis, chosen), value.degrees)
        if value is None or value.axis is None:
            return value if of_unlisted(values[1:]) is not None else None
        if value.axis < len(chosen) and chosen[value.axis] != slice(None):
            return None
        return Rows(axis_after(value.axis, chosen), value.degrees)

    def _is_window(self, rows: Any) -> bool:
        """Whether these are the rows between the bounds of a window."""
        if not isinstance(rows, slice) or rows.step is not None:
            return False
        return {_of_tensor(rows.start), _of_tensor(rows.stop)} == self._bounds != set()

    def looked_up(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        if any(isinstance(one, slice) for one in getattr(node.op, "idx_list", ())):
            return of_unlisted(values)
        table, index = values[0], values[-1]
        if table is not None and index is not None and index.axis == 0 and index.degrees <= {0}:
            if table.axis is None and len(values) == 2:  # as of embeddings
                return Rows(0, table.degrees)
            if table.axis == 0 and len(values) == 3 and self._counts_rows(node.inputs[1]):
                return Rows(0, table.degrees)  # table[arange(n), index]
        return of_unlisted(values)

    def _counts_rows(self, index: Variable) -> bool:
        """Whether this is ``arange(n)`` for the number of rows."""
        if index.owner is None or not isinstance(index.owner.op, names.ARange):
            return False
        start, stop, step = map(self.item, index.owner.inputs)
        return start == 0 and stop == LENGTH and step == 1

    def stacked(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        alike = len(set(values)) == 1 and values[0] is not None and values[0].axis is None
        return values[0] if alike else of_unlisted(values)

    def same(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        return values[0]


def _elementwise(
    op: scalar.ScalarOp, values: list[Rows | None], inputs: Sequence[Variable]
) -> Rows | None:
    """Return the `Rows` of the results of a scalar operation, None if they are not known."""
    known = all_known(values)
    if known is None:
        return None
    axes = {value.axis for value in known} - {None}
    if len(axes) > 1:
        return None
    axis = axes.pop() if axes else None
    if axis is not None:
        for value, one in zip(known, inputs):
            if value.axis is None and not one.type.broadcastable[axis]:
                return None
    degrees = _degrees(op, known, inputs)
    return None if degrees is None or len(degrees) > _MOST else Rows(axis, frozenset(degrees))


def _degrees(
    op: scalar.ScalarOp, values: list[Rows], inputs: Sequence[Variable]
) -> AbstractSet[float] | None:
    degrees = [value.degrees for value in values]
    if isinstance(op, _SAME):
        return degrees[0]
    if isinstance(op, scalar.Second):
        return degrees[1]
    if isinstance(op, _SUMS):
        return frozenset().union(*degrees)
    if isinstance(op, scalar.Switch):
        return degrees[1] | degrees[2]
    if isinstance(op, scalar.Mul):
        product = FIXED
        for value in values:
            product = Rows(None, product.times(value))
        return product.degrees
    if isinstance(op, scalar.Sqr):
        return values[0].times(values[0])
    if all(one <= {0} for one in degrees):
        return FIXED.degrees
    return _of_single_degrees(op, degrees, inputs)


def _of_single_degrees(
    op: scalar.ScalarOp, degrees: list[frozenset[float]], inputs: Sequence[Variable]
) -> AbstractSet[float] | None:
    """Return the degree of an operation whose degree is known only if each operand has a single term."""
    if isinstance(op, scalar.TrueDiv) and len(degrees[1]) == 1:
        (divisor,) = degrees[1]
        return {one - divisor for one in degrees[0]}
    if any(len(one) != 1 for one in degrees):
        return None
    (first,), *others = degrees
    if isinstance(op, scalar.Abs):
        return {first}
    if isinstance(op, Reciprocal):
        return {-first}
    if isinstance(op, scalar.Sqrt):
        return {first / 2}
    if isinstance(op, _CHOICES) and others[0] == {first}:
        return {first}
    if isinstance(op, scalar.LogicalComparison) and others[0] == {first}:
        return FIXED.degrees
    if isinstance(op, scalar.Pow) and isinstance(inputs[1], Constant):
        exponent = inputs[1].data
        return {first * float(exponent.reshape(-1)[0])} if exponent.size == 1 else None
    return None


def _of_tensor(bound: Any) -> Any:
    """Return the tensor that a bound of a slice was converted from, or the bound itself."""
    node = getattr(bound, "owner", None)
    if node is not None and isinstance(node.op, names.ScalarFromTensor):
        return node.inputs[0]
    return bound


def _raised(degrees: frozenset[float], by: int) -> Rows:
    return Rows(None, frozenset(degree + by for degree in degrees))


def all_known(values: Sequence[Rows | None]) -> list[Rows] | None:
    """Return the values; None if one of them is not known."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


def of_unlisted(values: Sequence[Rows | None]) -> Rows | None:
    """Return the value of an operation about which nothing is known except that it is deterministic."""
    fixed = all(one is not None and one.axis is None and one.degrees <= {0} for one in values)
    return FIXED if fixed else None


_RULES = [
    (names.Elemwise, "elementwise"),
    (names.CAReduce, "reduction"),
    (names.DimShuffle, "dimshuffle"),
    (names.COPIES, "same"),
    (names.Dot, "dot"),
    (names.BatchedDot, "batched_dot"),
    (names.Subtensor, "indexed"),
    ((names.AdvancedSubtensor1, names.AdvancedSubtensor), "looked_up"),
    (names.Reshape, "reshape"),
    (names.Alloc, "alloc"),
    (names.Shape_i, "shape_item"),
    (names.LARGEST, "largest"),
    (names.BY_ROW, "by_row"),
    (names.SOFTMAXES, "softmax"),
    (names.LINEAR_BY_ROW, "linear_by_row"),
    (names.CONVOLUTIONS, "convolution"),
    (names.POOLS, "pooling"),
    (names.MakeVector, "stacked"),
    (names.RANDOM, "random"),
]
