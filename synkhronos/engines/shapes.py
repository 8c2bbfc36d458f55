"""The items of shapes and indices in a graph, as far as they are constants or lengths of arrays.

An item is an int, or the `Rows` of a number: `LENGTH` for the number of rows; None if it is not known.
"""

import numpy as np

from synkhronos.engines.degrees import FIXED, LENGTH
from synkhronos.engines.names import (
    Constant,
    Elemwise,
    Join,
    MakeVector,
    Shape,
    Subtensor,
    constant_idx,
    get_idx_list,
    scalar,
)


def dims(shape, value_of):
    """Return the list of the items of a vector that is a shape; None if it is not known.

    ``value_of(variable)`` returns the `Rows` of a variable, or None.
    """
    node = shape.owner
    if isinstance(shape, Constant):
        return [int(one) for one in shape.data] if getattr(shape, "ndim", 0) == 1 else None
    if node is None or not node.inputs:
        return None
    op, first = node.op, node.inputs[0]
    if isinstance(op, Shape):
        value = value_of(first)
        if value is None:
            return None
        return [LENGTH if axis == value.axis else FIXED for axis in range(first.ndim)]
    if isinstance(op, MakeVector):
        return [item(one, value_of) for one in node.inputs]
    if isinstance(op, Join):
        parts = [dims(one, value_of) for one in node.inputs[1:]]
        return None if None in parts else sum(parts, [])
    if isinstance(op, Elemwise) and isinstance(op.scalar_op, (scalar.Cast, scalar.Identity)):
        return dims(first, value_of)
    if isinstance(op, Subtensor):
        items, chosen = dims(first, value_of), constant_index(node)
        if items is not None and len(chosen) == 1 and isinstance(chosen[0], slice):
            return items[chosen[0]] if _is_constant(chosen[0]) else None
    return None


def item(number, value_of):
    """Return an item of a shape."""
    return int(number.data) if isinstance(number, Constant) else value_of(number)


def constant_index(node):
    """Return the index of a `Subtensor`, with ints in place of constants."""
    return [
        slice(*map(_plain, (one.start, one.stop, one.step))) if isinstance(one, slice) else _plain(one)
        for one in constant_idx(node)
    ]


def axis_after(axis, index):
    """Return which axis of the indexed array an axis becomes; `index` is that of a `Subtensor`."""
    return axis - sum(not isinstance(one, slice) for one in index[:axis])


def numbers_along(node):
    """Return ``(axis, numbers)`` of a node that looks up items of one axis by their numbers, else None.

    All of the other axes are kept.
    """
    op = node.op
    if getattr(op, "idx_list", None) is not None:
        entries = get_idx_list(node.inputs, op.idx_list)
    else:
        entries = node.inputs[1:]
    chosen = [(axis, one) for axis, one in enumerate(entries) if not _is_all(one)]
    if len(chosen) != 1 or getattr(chosen[0][1], "ndim", None) != 1:
        return None
    return chosen[0] if chosen[0][1].type.dtype.startswith(("int", "uint")) else None


def _is_all(entry):
    node = getattr(entry, "owner", None)
    if node is not None and type(node.op).__name__ == "MakeSlice":
        return all(getattr(one, "data", one) is None for one in node.inputs)
    entry = entry.data if isinstance(entry, Constant) else entry
    return isinstance(entry, slice) and entry == slice(None)


def _plain(index):
    return int(index) if isinstance(index, (np.ndarray, np.integer)) else index


def _is_constant(index):
    return all(one is None or isinstance(one, int) for one in (index.start, index.stop, index.step))
