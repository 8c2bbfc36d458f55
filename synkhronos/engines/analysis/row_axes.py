"""Which axis of a value has the rows, also where a row of it depends on several rows.

`rows` tells how a value on some of the rows relates to the value on all of them, so it knows an axis
only if each row is computed from a single row. Here, it is enough that the items along an axis are rows,
in some order and number: as in a difference of neighbours, in rows in another order, less the mean of
all rows, or after a loop over them. A part of these items is then a part of a value that was computed
from all rows.
"""

from __future__ import annotations

import math
from typing import Sequence

from synkhronos.engines import names
from synkhronos.engines.analysis.rows import FIXED, LENGTH, RowGraph, Rows, of_unlisted
from synkhronos.engines.analysis.shapes import (
    axis_after,
    constant_index,
    normalized_axes,
    numbers_along,
    present_extent,
    present_items,
    without_axes,
)
from synkhronos.engines.names import Apply

#: Operations on sparse matrices, by their names: the compiler imports these when they are used.
_SPARSE_ROWS = ("GetItem2d", "DenseFromSparse", "SparseFromDense", "Cast")


class RowAxes(RowGraph):
    """The `Rows` of the variables of a graph, of which only the axes count."""

    def _apply(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        for kinds, rule in _RULES:
            if isinstance(node.op, kinds):
                return getattr(self, rule)(node, values)
        if type(node.op).__name__ in _SPARSE_ROWS and "sparse" in type(node.op).__module__:
            return self.sparse(node, values)
        return super()._apply(node, values)

    def elementwise(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        """The axis of the known operands: the others have the same extent along it, or are broadcast."""
        found = super().elementwise(node, values)
        return found or _on_one_axis([value for value in values if value is not None])

    def reduction(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        return super().reduction(node, values) or _reduced(node, values[0])

    def largest(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        return super().largest(node, values) or _reduced(node, values[0])

    def indexed(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        value, chosen = values[0], constant_index(node)
        if value is None or value.axis is None or value.axis >= len(chosen):
            return super().indexed(node, values)
        if not isinstance(chosen[value.axis], slice):
            return FIXED
        return Rows(axis_after(value.axis, chosen), value.degrees)

    def looked_up(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        found, table = numbers_along(node), values[0]
        if found is None or table is None or values[-1] is None:
            return super().looked_up(node, values)
        if table.axis is None:
            return Rows(found[0], FIXED.degrees) if values[-1].axis == 0 else of_unlisted(values)
        if values[-1].axis is None or found[0] == table.axis:
            return Rows(table.axis, FIXED.degrees)
        return None

    def joined(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        axis, parts = names.joined(node)
        return None if axis is None else _on_one_axis(values[-len(parts) :]) or of_unlisted(values)

    def written(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        """The value of an operation that sets or increases items of its first operand."""
        return None if None in values else values[0]

    def reshape(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        return super().reshape(node, values) or self._reshaped(node, values[0])

    def _reshaped(self, node: Apply, value: Rows | None) -> Rows | None:
        """The axis that has as many items before it as the axis of rows had."""
        shape, present = self.dims(node.inputs[1]), present_items(node.inputs[1])
        if value is None or value.axis is None or not shape or not present:
            return None
        before = [present_extent(node.inputs[0], axis) for axis in range(value.axis)]
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
        is_known = isinstance(shape[axis], int) or shape[axis] == LENGTH
        are_known = all(isinstance(one, int) or one == FIXED for one in shape[axis + 1 :])
        return Rows(axis, FIXED.degrees) if is_known and are_known else None

    def by_row(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        found = super().by_row(node, values)
        if found is None and None not in values and node.outputs[0].ndim == node.inputs[0].ndim:
            return values[0]  # such as the softmax, along any axis
        return found

    def softmax(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        return super().softmax(node, values) or values[0]

    def counted(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        start, stop, step = map(self.item, node.inputs)
        is_by_row = start in (0, FIXED) and stop == LENGTH and step == 1
        return Rows(0, FIXED.degrees) if is_by_row else of_unlisted(values)

    def chosen(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        """One of two values, depending on a condition."""
        return None if len(node.outputs) > 1 else _on_one_axis(values) or of_unlisted(values)

    def looped(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        """A loop has an item for each step, so it has rows on axis 0 if its sequences do."""
        sequences = values[1 : 1 + len(node.op.outer_seqs(node.inputs))]
        is_by_row = any(one is not None and one.axis == 0 for one in sequences)
        return Rows(0, FIXED.degrees) if is_by_row else of_unlisted(values)

    def sparse(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        value = values[0]
        if value is None or value.axis != 0:
            return of_unlisted(values)
        return value


def _on_one_axis(values: Sequence[Rows | None]) -> Rows | None:
    """Return the common `Rows` if the values that have rows have them on the same axis, else None."""
    axes = {value.axis for value in values if value is not None} - {None}
    return Rows(axes.pop(), FIXED.degrees) if None not in values and len(axes) == 1 else None


def _reduced(node: Apply, value: Rows | None) -> Rows | None:
    if value is None or value.axis is None:
        return None
    axes = normalized_axes(node.op.axis, node.inputs[0].ndim)
    if value.axis in axes:
        return FIXED
    return Rows(without_axes(value.axis, axes), FIXED.degrees)


_RULES = [
    (names.Join, "joined"),
    (names.WRITES, "written"),
    (names.ARange, "counted"),
    (names.Scan, "looped"),
    (names.IfElse, "chosen"),
]
