"""The items of shapes and indices in a graph, as far as they are constants or extents of arrays.

An item is an int, or what stands for an extent; None if it is not known.
"""

import numpy as np

from synkhronos.engines.names import (
    Constant,
    Elemwise,
    Join,
    MakeVector,
    Shape,
    Subtensor,
    constant_idx,
    scalar,
)


def dims(shape, value_of, extents_of):
    """Return the list of the items of a vector that is a shape; None if it is not known.

    ``value_of(variable)`` returns what stands for a number, or None, and ``extents_of(variable)`` the
    list of what stands for the extents of an array, or None.
    """
    node = shape.owner
    if isinstance(shape, Constant):
        return [int(one) for one in shape.data] if getattr(shape, "ndim", 0) == 1 else None
    if node is None or not node.inputs:
        return None
    op, first = node.op, node.inputs[0]
    if isinstance(op, Shape):
        return extents_of(first)
    if isinstance(op, MakeVector):
        return [item(one, value_of) for one in node.inputs]
    if isinstance(op, Join):
        parts = [dims(one, value_of, extents_of) for one in node.inputs[1:]]
        return None if None in parts else sum(parts, [])
    if isinstance(op, Elemwise) and isinstance(op.scalar_op, (scalar.Cast, scalar.Identity)):
        return dims(first, value_of, extents_of)
    if isinstance(op, Subtensor):
        items, chosen = dims(first, value_of, extents_of), constant_index(node)
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


def _plain(index):
    return int(index) if isinstance(index, (np.ndarray, np.integer)) else index


def _is_constant(index):
    return all(one is None or isinstance(one, int) for one in (index.start, index.stop, index.step))
