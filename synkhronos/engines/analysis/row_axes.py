"""Which axis of a value has the rows, also where a row of it depends on several rows.

`rows` tells how a value on some of the rows relates to the value on all of them, so it knows an axis
only if each row is computed from a single row. Here, it is enough that the items along an axis are rows,
in some order and number: as in a difference of neighbours, in rows in another order, less the mean of
all rows, or after a loop over them. A part of these items is then a part of a value that was computed
from all rows.
"""

from __future__ import annotations

import math

from synkhronos.engines import names
from synkhronos.engines.analysis.rows import FIXED, LENGTH, RowGraph, Rows, of_unlisted
from synkhronos.engines.analysis.rules import Part, rule_of
from synkhronos.engines.analysis.shapes import (
    dims,
    item,
    numbers_along,
    present_extent,
    present_items,
)
from synkhronos.engines.names import Apply

#: Operations on sparse matrices, by their names: the compiler imports these when they are used.
_SPARSE_ROWS = ("GetItem2d", "DenseFromSparse", "SparseFromDense", "Cast")


class RowAxes(RowGraph):
    """The `Rows` of the variables of a graph, of which only the axes count."""

    def _apply(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        if isinstance(node.op, names.WRITES):
            return None if None in values else values[0]
        if isinstance(node.op, names.Scan):
            return self._looped(node, values)
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
        return FIXED if len(known) == 1 == sum(bool(one) for one in rule.inputs) else None

    def looked_up(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        found, table = numbers_along(node), values[0]
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
        shape, present = dims(node.inputs[1]), present_items(node.inputs[1])
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
        is_known = isinstance(shape[axis], int) or self.number(shape[axis]) == LENGTH
        are_known = all(self.number(one) == FIXED for one in shape[axis + 1 :])
        return Rows(axis, FIXED.degrees) if is_known and are_known else None

    def counted(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        start, stop, step = (self.number(item(one)) for one in node.inputs)
        is_by_row = start == FIXED and stop == LENGTH and item(node.inputs[2]) == 1
        return Rows(0, FIXED.degrees) if is_by_row else of_unlisted(values)

    def _looped(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        """A loop has an item for each step, so it has rows on axis 0 if its sequences do."""
        sequences = values[1 : 1 + len(node.op.outer_seqs(node.inputs))]
        is_by_row = any(one is not None and one.axis == 0 for one in sequences)
        return Rows(0, FIXED.degrees) if is_by_row else of_unlisted(values)

    def sparse(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        value = values[0]
        if value is None or value.axis != 0:
            return of_unlisted(values)
        return value
