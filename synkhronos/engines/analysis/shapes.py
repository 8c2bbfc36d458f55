"""The items of shapes and indices in a graph, as far as they are constants or extents of arrays.

An item is an int, an `Extent`, or else the variable that computes it.
"""

from __future__ import annotations

from typing import Any, Sequence, Tuple, Union

import numpy as np

from synkhronos.engines import names
from synkhronos.engines.names import Apply, Constant, Variable, get_idx_list, scalar

#: An axis of an array, ``(variable, axis)``, that has this extent
Extent = Tuple[Variable, int]
Item = Union[int, Extent, Variable]


def dims(shape: Variable) -> list[Item] | None:
    """Return the list of the items of a vector that is a shape; None if it is not known."""
    node = shape.owner
    if isinstance(shape, Constant):
        return [int(length) for length in shape.data] if getattr(shape, "ndim", 0) == 1 else None
    if node is None or not node.inputs:
        return None
    op, first = node.op, node.inputs[0]
    if isinstance(op, names.Shape):
        return [(first, axis) for axis in range(getattr(first.type, "ndim", 0))]
    if isinstance(op, names.MakeVector):
        return [item(variable) for variable in node.inputs]
    if isinstance(op, names.Join):
        parts = [dims(entry) for entry in names.joined(node)[1]]
        known = [part for part in parts if part is not None]
        return sum(known, []) if len(known) == len(parts) else None
    if isinstance(op, names.Elemwise) and isinstance(op.scalar_op, (scalar.Cast, scalar.Identity)):
        return dims(first)
    if isinstance(op, names.Subtensor):
        items, chosen = dims(first), constant_index(node)
        if items is not None and len(chosen) == 1 and isinstance(chosen[0], slice):
            return items[chosen[0]] if _is_constant(chosen[0]) else None
    return None


def item(number: Variable) -> Item:
    """Return an item of a shape."""
    plain = _without_casts(number)
    if isinstance(plain, Constant):
        return int(plain.data)
    node = plain.owner
    if node is not None and isinstance(node.op, names.Shape_i):
        return node.inputs[0], node.op.i
    if node is not None and isinstance(node.op, names.Subtensor):
        items, index = dims(node.inputs[0]), constant_index(node)
        if items and len(index) == 1 and type(index[0]) is int and -len(items) <= index[0] < len(items):
            return items[index[0]]
    return plain


def _without_casts(number: Variable) -> Variable:
    while number.owner is not None:
        op = number.owner.op
        is_cast = isinstance(getattr(op, "scalar_op", None), (scalar.Cast, scalar.Identity))
        if not is_cast and not isinstance(op, (names.TensorFromScalar, names.ScalarFromTensor)):
            break
        [number] = number.owner.inputs
    return number


def constant_index(node: Apply) -> list[Any]:
    """Return the index of a `Subtensor`, with ints in place of constants."""
    return [
        slice(*map(_plain, (item.start, item.stop, item.step)))
        if isinstance(item, slice)
        else _plain(item)
        for item in names.constant_idx(node)
    ]


def axis_after(axis: int, index: Sequence[Any]) -> int:
    """Return the number of an axis in the indexed array; `index` is the index of a `Subtensor`."""
    return axis - sum(not isinstance(item, slice) for item in index[:axis])


def normalized_axes(axes: int | tuple[int, ...] | list[int] | None, ndim: int) -> Sequence[int]:
    """Return the axes of an operation, where None stands for all, counted from the first."""
    if axes is None:
        return range(ndim)
    return [axis % ndim for axis in (axes if isinstance(axes, (tuple, list)) else [axes])]


def numbers_along(node: Apply, numbers: Sequence[Variable] | None = None) -> tuple[int, Variable] | None:
    """Return ``(axis, numbers)`` of a node that looks up items of one axis by their numbers, else None.

    The other axes are kept. By default, all inputs but the first are numbers.
    """
    entries: Any = node.inputs[1:] if numbers is None else numbers
    if getattr(node.op, "idx_list", None) is not None:
        entries = get_idx_list([node.inputs[0], *entries], node.op.idx_list)
    chosen = [(axis, entry) for axis, entry in enumerate(entries) if not _is_all(entry)]
    if len(chosen) != 1 or getattr(chosen[0][1], "ndim", None) != 1:
        return None
    return chosen[0] if chosen[0][1].type.dtype.startswith(("int", "uint")) else None


def _is_all(entry: Any) -> bool:
    node = getattr(entry, "owner", None)
    if node is not None and type(node.op).__name__ == "MakeSlice":
        return all(getattr(variable, "data", variable) is None for variable in node.inputs)
    entry = entry.data if isinstance(entry, Constant) else entry
    return isinstance(entry, slice) and entry == slice(None)


def _plain(index: Any) -> Any:
    return int(index) if isinstance(index, (np.ndarray, np.integer)) else index


def _is_constant(index: slice) -> bool:
    return all(item is None or isinstance(item, int) for item in (index.start, index.stop, index.step))
