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

import math
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos.engines import names
from synkhronos.engines.analysis import shapes
from synkhronos.engines.analysis.graphs import steps_in
from synkhronos.engines.analysis.rules import Labels, Part, Rule, Terms, ndim, product_of_powers, rule_of
from synkhronos.engines.analysis.shapes import Item, item
from synkhronos.engines.base import BOUND, PARTLY_SUM, ROWS, SUM
from synkhronos.engines.names import Apply, Constant, SharedVariable, Variable, io_toposort, scalar

_ROUNDS = 4  # in which the states of a loop are found

#: Operations on sparse matrices, by their names: the compiler imports these when they are used.
_SPARSE_ROWS = ("GetItem2d", "DenseFromSparse", "SparseFromDense", "Cast")


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


#: What an output is whose terms have these degrees
_EXTENTS = {frozenset([1.0]): SUM, frozenset([0.0, 1.0]): PARTLY_SUM}


def _extent(value: Rows | None) -> str | None:
    if value is None or value.axis is not None:
        return None if value is None else ROWS
    return _EXTENTS.get(value.degrees)


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
        given = {item: of_input(axis) for item, axis in axes.items() if not isinstance(axis, str)}
        self._values = {**(known or {}), **given}
        self._bounds = {item for item, axis in axes.items() if axis == BOUND}

    def values_of(self, variables: Sequence[Variable]) -> list[Rows | None]:
        """Return the values of variables, after finding those of the graph."""
        for node in io_toposort([*self._values, *self._bounds], variables):
            self.add(node)
        return [self.value(variable) for variable in variables]

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
        found = self._apply(node, [self.value(variable) for variable in node.inputs])
        for place, output in enumerate(node.outputs):
            self._values.setdefault(output, found[place] if isinstance(found, list) else found)

    def _apply(self, node: Apply, values: list[Rows | None]) -> Rows | list[Rows | None] | None:
        op = node.op
        if isinstance(op, names.Scan):
            return self.looped(node, values)
        if isinstance(op, (names.Subtensor, names.Shape_i)):
            dim = item(node.outputs[0])
            if dim is not node.outputs[0]:  # an item of a shape
                return self.number(dim)
        for kinds, special in _SPECIAL:
            if isinstance(op, kinds):
                return getattr(self, special)(node, values)
        return self.by_rule(node, values)

    def number(self, item: Item) -> Rows | None:
        """Return the value of an item of a shape."""
        if isinstance(item, int):
            return FIXED
        if not isinstance(item, tuple):
            return self.value(item)
        value = self.value(item[0])
        return None if value is None else LENGTH if value.axis == item[1] else FIXED

    # Rules: each returns the value of all outputs of a node

    def by_rule(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        """Return the value that the rule of an operation gives."""
        if all(value is FIXED for value in values):
            return FIXED
        rule = rule_of(node)
        if rule is None:
            return of_unlisted(values)
        used = [
            (labels, FIXED if labels is None else value) for labels, value in zip(rule.inputs, values)
        ]
        known = [(labels or (), value) for labels, value in used if value is not None]
        along = {labels[value.axis] for labels, value in known if value.axis is not None}
        if len(known) < len(used) or len(along) > 1 or along & {None, *rule.mixed}:
            return None
        for label in along:
            if any(value.axis is None and label in labels for labels, value in known):
                return None
            return _along(rule, label, known)
        degrees = rule.degrees([value.degrees for _, value in known])
        return None if degrees is None else FIXED if degrees == {0} else Rows(None, degrees)

    def looped(self, node: Apply, values: list[Rows | None]) -> Rows | list[Rows | None] | None:
        graph = self.of_steps(node)
        if graph is None:
            return of_unlisted(values)
        found = {end: _ahead(graph.value(output), -1) for output, end in steps_in(node).ends}
        return [found.get(output) for output in node.outputs]

    def of_steps(self, loop: Apply) -> RowGraph | None:
        """Return the values in the steps of a loop; None if the steps may be rows, or differ."""
        if self.value(loop.inputs[0]) != FIXED:  # the number of steps
            return None
        steps = steps_in(loop)
        known = {
            variable: _ahead(self.value(source), ndim(source) - ndim(variable))
            for variable, source in steps.sources
        }
        for _ in range(_ROUNDS):
            graph = RowGraph({}, known)
            graph.values_of(steps.outputs)
            later = {state: _alike(known[state], graph.value(item)) for item, state in steps.states}
            if all(known[item] == value for item, value in later.items()):
                return graph
            known.update(later)
        return None

    def reduction(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        items = shapes.dims(node.inputs[0])
        if items is None or not isinstance(node.op.scalar_op, scalar.Mul):
            return self.by_rule(node, values)
        numbers = [self.number(item) for item in items]  # often those of a shape
        known = [number.degrees for number in numbers if number is not None and number.axis is None]
        degrees = product_of_powers((1,) * len(known), known) if len(known) == len(numbers) else None
        return None if degrees is None else Rows(None, degrees)

    def reshape(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        value, items = values[0], shapes.dims(node.inputs[1])
        if value is None or not items:
            return of_unlisted(values)
        first, rest = items[0], [self.number(item) for item in items[1:]]
        if any(item != FIXED for item in rest):
            return None
        if value.axis is None:
            return value if self.number(first) == FIXED else None
        is_kept = value.axis == 0 and (first == -1 or self.number(first) == LENGTH)
        return Rows(0, value.degrees) if is_kept else None

    def counted(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        return of_unlisted(values)

    def empty(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        return self._filled([item(variable) for variable in node.inputs], ZERO.degrees)

    def alloc(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        if values[0] is None or values[0].axis is not None:
            return None
        return self._filled([item(variable) for variable in node.inputs[1:]], values[0].degrees)

    def random(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        shape = shapes.dims(node.inputs[1])
        if shape is None or any(self.number(item) is None for item in shape):
            return of_unlisted(values)
        known = all(value is not None and value.degrees <= {0} for value in values[2:])
        return self._filled(shape, FIXED.degrees) if known else None

    def _filled(self, shape: Sequence[Item], degrees: frozenset[float]) -> Rows | None:
        numbers = [self.number(item) for item in shape]
        axes = [axis for axis, number in enumerate(numbers) if number == LENGTH]
        if len(axes) > 1 or any(number not in (LENGTH, FIXED) for number in numbers):
            return None
        return Rows(axes[0] if axes else None, degrees)

    def indexed(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        value, chosen = values[0], shapes.constant_index(node)
        if value is not None and value.axis is None:
            for axis, item in enumerate(chosen):
                if self._is_window(item):
                    return Rows(shapes.axis_after(axis, chosen), value.degrees)
        return self.by_rule(node, values)

    def _is_window(self, rows: Any) -> bool:
        """Whether these are the rows between the bounds of a window."""
        if not isinstance(rows, slice) or rows.step is not None:
            return False
        return {_of_tensor(rows.start), _of_tensor(rows.stop)} == self._bounds != set()

    def looked_up(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        table, index = values[0], values[-1]
        if len(values) == 3 and None not in (table, index) and self.counts_rows(node.inputs[1]):
            if table.axis == index.axis == 0 and index.degrees <= {0}:  # type: ignore[union-attr]
                return Rows(0, table.degrees)  # type: ignore[union-attr]  # table[arange(n), index]
        return self.by_rule(node, values)

    def written_at(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        array, part, index = values[0], values[1], values[-1]
        if None not in (array, part, index) and self.counts_rows(node.inputs[2]) and len(values) == 4:
            is_by_row = array.axis == index.axis == 0 and index.degrees <= {0}  # type: ignore[union-attr]
            if is_by_row and part.axis == (0 if ndim(node.inputs[1]) else None):  # type: ignore[union-attr]
                return _alike(array, Rows(0, part.degrees))  # type: ignore[union-attr]  # as in one-hot codes
        return self.by_rule(node, values)

    def counts_rows(self, index: Variable) -> bool:
        """Whether this is ``arange(n)`` for the number of rows."""
        if index.owner is None or not isinstance(index.owner.op, names.ARange):
            return False
        start, stop, step = map(item, index.owner.inputs)
        return start == 0 and step == 1 and self.number(stop) == LENGTH


class RowAxes(RowGraph):
    """Which axis of a value has the rows, also where a row of it depends on several rows.

    A `RowGraph` tells how a value on some of the rows relates to the value on all of them, so it knows
    an axis only if each row is computed from a single row. Here, it is enough that the items along an
    axis are rows, in some order and number: as in a difference of neighbours, in rows in another order,
    less the mean of all rows, or after a loop over them. A part of these items is then a part of a value
    that was computed from all rows. Of the `Rows`, only the axes count.
    """

    def _apply(self, node: Apply, values: list[Rows | None]) -> Rows | list[Rows | None] | None:
        if isinstance(node.op, names.WRITES):
            return None if None in values else values[0]
        if type(node.op).__name__ in _SPARSE_ROWS and "sparse" in type(node.op).__module__:
            return self.sparse(node, values)
        return super()._apply(node, values)

    def by_rule(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        """The axis of the known operands: the others have the same extent along it, or are broadcast."""
        rule, found = rule_of(node), super().by_rule(node, values)
        if found is not None or rule is None:
            return found
        known = [
            (labels, value) for labels, value in zip(rule.inputs, values) if labels and value is not None
        ]
        along = {labels[value.axis] for labels, value in known if value.axis is not None}
        if not along or None in along:
            return None
        for axis, label in enumerate(rule.outputs[0]):
            if along <= {*(label.labels if isinstance(label, Part) else [label])}:
                return Rows(axis, FIXED.degrees)
        return FIXED if len(known) == 1 == sum(bool(variable) for variable in rule.inputs) else None

    def looked_up(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        found, table = shapes.numbers_along(node), values[0]
        if found is None or table is None or values[-1] is None:
            return super().looked_up(node, values)
        if table.axis is None:
            return Rows(found[0], FIXED.degrees) if values[-1].axis == 0 else of_unlisted(values)
        if values[-1].axis is None or found[0] == table.axis:
            return Rows(table.axis, FIXED.degrees)
        return None

    def reshape(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        return super().reshape(node, values) or self._reshaped(node, values[0])

    def _reshaped(self, node: Apply, value: Rows | None) -> Rows | None:
        """The axis that has as many items before it as the axis of rows had."""
        shape = shapes.dims(node.inputs[1])
        if value is None or value.axis is None or not shape:
            return None
        present = [_present_extent(node.outputs[0], axis) for axis in range(len(shape))]
        before = [_present_extent(node.inputs[0], axis) for axis in range(value.axis)]
        known = [extent for extent in before if extent is not None]
        if len(known) < len(before):
            return None
        wanted, n_items, axis = math.prod(known), 1, 0
        while axis < len(shape) and (n_items != wanted or shape[axis] == 1):
            extent = present[axis]
            if extent is None:
                return None
            n_items, axis = n_items * extent, axis + 1
        if axis == len(shape) or n_items != wanted:
            return None
        is_known = isinstance(shape[axis], int) or self.number(shape[axis]) == LENGTH
        are_known = all(self.number(item) == FIXED for item in shape[axis + 1 :])
        return Rows(axis, FIXED.degrees) if is_known and are_known else None

    def counted(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        start, stop, step = (self.number(item(variable)) for variable in node.inputs)
        is_by_row = start == FIXED and stop == LENGTH and item(node.inputs[2]) == 1
        return Rows(0, FIXED.degrees) if is_by_row else of_unlisted(values)

    def looped(self, node: Apply, values: list[Rows | None]) -> Rows | list[Rows | None] | None:
        """A loop has an item for each step, so it has rows on axis 0 if its sequences do."""
        sequences = values[1 : 1 + len(node.op.outer_seqs(node.inputs))]
        is_by_row = any(sequence is not None and sequence.axis == 0 for sequence in sequences)
        return Rows(0, FIXED.degrees) if is_by_row else super().looped(node, values)

    def sparse(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        value = values[0]
        if value is None or value.axis != 0:
            return of_unlisted(values)
        return value


def _present_extent(variable: Variable, axis: int) -> int | None:
    """Return the present extent of a variable along an axis; None if it is not known.

    It is a constant, or that of a shared variable which has a value now.
    """
    while variable.owner is not None:
        node, rule = variable.owner, rule_of(variable.owner)
        if rule is None:
            return None
        label = rule.outputs[node.outputs.index(variable)][axis]
        given: list[Any] = [number for _, number, key in rule.numbers if key == (variable, axis)]
        given += [
            (operand, labels.index(label))
            for operand, labels in zip(node.inputs, rule.inputs)
            if label is not None and labels and label in labels
        ]
        if not given or isinstance(given[0], int):
            return 1 if variable.type.broadcastable[axis] else given[0] if given else None
        variable, axis = given[0]
    if isinstance(variable, SharedVariable):
        return variable.get_value(borrow=True, return_internal_type=True).shape[axis]
    return variable.data.shape[axis] if isinstance(variable, Constant) else None


def _ahead(value: Rows | None, axes: int) -> Rows | None:
    """Return a value without its first axes; None if one of them has the rows."""
    if value is None or value.axis is None:
        return value
    return None if value.axis < axes else Rows(value.axis - axes, value.degrees)


def _alike(first: Rows | None, second: Rows | None) -> Rows | None:
    """Return the value of something that is one of two; None if they are not of a kind."""
    if first is None or second is None or first.axis != second.axis:
        return None
    is_same = not first.degrees or not second.degrees or first.degrees == second.degrees
    return Rows(first.axis, first.degrees | second.degrees) if is_same else None


def _along(rule: Rule, label: Any, known: Sequence[tuple[Labels, Rows]]) -> Rows | None:
    """Return the value of operands that have rows along the axes with a label."""
    output = rule.outputs[0]
    is_reduced, parts = label not in output, [item for item in output if isinstance(item, Part)]
    if is_reduced and (rule.reduced is None or any(label in part.labels for part in parts)):
        return None
    added = 1 if is_reduced and rule.reduced == "sum" else 0
    has_terms = isinstance(rule.values, Terms)
    each = [
        _raised(value.degrees, added) if has_terms and label in labels else value.degrees
        for labels, value in known
    ]
    degrees = rule.degrees(each)
    if degrees is None:
        return None
    if not is_reduced:
        return Rows(output.index(label), degrees)
    return Rows(None, degrees if has_terms else _raised(degrees, added))


def _of_tensor(bound: Any) -> Any:
    """Return the tensor that a bound of a slice was converted from, or the bound itself."""
    node = getattr(bound, "owner", None)
    if node is not None and isinstance(node.op, names.ScalarFromTensor):
        return node.inputs[0]
    return bound


def _raised(degrees: frozenset[float], by: int) -> frozenset[float]:
    return frozenset(degree + by for degree in degrees)


def of_unlisted(values: Sequence[Rows | None]) -> Rows | None:
    """Return the value of an operation about which nothing is known except that it is deterministic."""
    fixed = all(value is not None and value.axis is None and value.degrees <= {0} for value in values)
    return FIXED if fixed else None


_SPECIAL = [
    (names.CAReduce, "reduction"),
    (names.Subtensor, "indexed"),
    ((names.AdvancedSubtensor1, names.AdvancedSubtensor), "looked_up"),
    ((names.AdvancedIncSubtensor1, names.AdvancedIncSubtensor), "written_at"),
    (names.Reshape, "reshape"),
    (names.Alloc, "alloc"),
    (names.AllocEmpty, "empty"),
    (names.RANDOM, "random"),
    (names.ARange, "counted"),
]
