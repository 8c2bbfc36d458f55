"""Missing values, and rows that are set or selected by masks and indices.

PyMC divides a variable with missing values into the observed items and a free variable for the others.
The variable itself becomes a join of both, which `joined_by_row` computes item by item: from constants,
and from the free values by their positions. The parameters of the observed items are a selection of the
rows of all items, which `selected_first` computes from the selected rows of the data.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.basic import AllocEmpty

from synkhronos._typing import AnyArray
from synkhronos.engines import names
from synkhronos.engines.names import Apply, Constant, Variable, ancestors, io_toposort
from synkhronos.extensions.pymc.leaves import (
    array_of,
    freed,
    has_length,
    is_leaf,
    is_sparse,
    value_of,
)
from synkhronos.extensions.pymc.potential import substitute

#: Operations that select items by masks or indices
SELECTIONS = (names.AdvancedSubtensor, names.AdvancedSubtensor1)


# Joins


def joined_by_row(graph: Variable, parameters: Sequence[Variable]) -> Variable:
    """Return a graph in which joins of constants and of free values are computed item by item."""
    writes = [node.outputs[0] for node in io_toposort(parameters, [graph]) if _is_set(node)]
    new = dict(zip(parameters, parameters))
    for join in writes:
        by_item = _by_item(join)
        if by_item is not None:  # which may contain earlier ones
            (new[join],) = substitute([by_item], new)
    return substitute([graph], new)[0] if len(new) > len(parameters) else graph


def _is_set(node: Apply) -> bool:
    is_write = isinstance(node.op, names.WRITES)
    return is_write and bool(getattr(node.op, "set_instead_of_inc", False))


def _by_item(join: Variable) -> Variable | None:
    """Return the items of a join by their positions in what is joined; None if they are not known."""
    writes: list[Apply] = []
    base = join
    while base.owner and _is_set(base.owner):
        writes.append(base.owner)
        base = base.owner.inputs[0]
    is_empty = bool(base.owner and isinstance(base.owner.op, AllocEmpty))
    # Extents are shared variables if they are of dims.
    extents: list[Any] = list(base.type.shape)
    if is_empty:
        extents = [value_of(item) for item in base.owner.inputs]
    indices = [variable for node in writes for variable in node.inputs[2:]]
    indices = [value_of(variable) for variable in indices if not isinstance(variable, Constant)]
    if any(known is None for known in extents + indices):
        return None
    shape = tuple(int(extent) for extent in extents)
    kind, position = np.full(shape, -1), np.zeros(shape, "int64")
    filled = np.zeros(shape, join.type.dtype)
    joined = [(node, node.inputs[1], value_of(node.inputs[1])) for node in reversed(writes)]
    for number, (node, value, known) in enumerate(joined):
        kind = _written(node, kind, np.array(number))
        if known is not None:
            filled = _written(node, filled, known)
        elif not _is_single(value):
            n_items = int((kind == number).sum())
            if None not in value.type.shape and math.prod(value.type.shape) != n_items:
                return None  # an item is set twice
            items = np.arange(n_items).reshape(-1, *shape[1:][: value.type.ndim - 1])
            position = _written(node, position, items)
    if is_empty and (kind < 0).any() or not is_empty and (kind == kind[:1]).all():
        return None  # some are not known, or all rows have the same ones
    result = pt.constant(filled) if is_empty else base
    for number, (_, value, known) in enumerate(joined):
        is_written = kind == number
        if known is None:
            place = 0 if _is_single(value) else pt.constant(np.where(is_written, position, 0))
            result = pt.switch(pt.constant(is_written), value.ravel()[place], result)
        elif not is_empty:
            result = pt.switch(pt.constant(is_written), pt.constant(filled), result)
    return result


def _is_single(value: Variable) -> bool:
    return all(extent == 1 for extent in value.type.shape)


def _written(node: Apply, array: AnyArray, value: AnyArray) -> AnyArray:
    """Return an array after the write of a node."""
    made = node.op.make_node(pt.constant(array), pt.constant(value), *node.inputs[2:])
    result: AnyArray = made.outputs[0].eval(mode="FAST_COMPILE")
    return result


# Selections


def selected_first(
    graph: Variable, n_rows: int | None, inputs: Sequence[Variable], values: Callable[[], Sequence[Any]]
) -> tuple[Variable, list[Variable]]:
    """Return a graph in which rows are selected before anything is computed of them.

    Parameters
    ----------
    graph : variable
    n_rows : int or None
        The number of rows that a selection has; None for any.
    inputs : list of variables
        The inputs of the graph.
    values : callable
        Returns values of the inputs, with which the new graph is compared to the old one.

    Returns
    -------
    graph : variable
        The old one if it has no selections, or the values differ.
    sources : list of Constant or SharedVariable
        From which rows were selected.
    """
    sources: list[Variable] = []
    new: dict[Variable, Variable] = {}
    for node in io_toposort(inputs, [graph]):
        index = _index_of_rows(node) if isinstance(node.op, SELECTIONS) else None
        if index is None or n_rows is not None and len(index.rows) != n_rows:
            continue
        (old,) = node.outputs
        for leaves in _rows_of(node.inputs[0], inputs, index.rows[-1]):
            selected = _from_selected(node.inputs[0], inputs, leaves, index)
            if selected is not None and _agree(old, selected, inputs, values()):
                new[old] = selected
                sources += leaves
                break
        else:
            if index.is_mask:  # the numbers of the rows are rows, and a mask is longer
                new[old] = node.inputs[0][tuple(index.numbers)]
    return substitute([graph], {**dict(zip(inputs, inputs)), **new})[0] if new else graph, sources


def select_first(
    variables: Sequence[Variable], values: Callable[[Sequence[Variable]], Sequence[Any]]
) -> None:
    """Have free variables, as those of missing items, depend on selected rows of the data alone.

    Parameters
    ----------
    variables : list of variables
        The free variables of a model, which are changed.
    values : callable
        Returns values of some of them.
    """
    for variable in variables:
        others = [item for item in variables if item is not variable]
        for position, operand in enumerate(variable.owner.inputs if variable.owner else ()):
            by_row = joined_by_row(operand, others)
            selected, sources = selected_first(by_row, None, others, functools.partial(values, others))
            if sources:
                variable.owner.inputs[position] = selected


class _Index(NamedTuple):
    """The items that a node selects.

    Attributes
    ----------
    numbers : list of variables
        The numbers of the items along the first axes.
    rows : array
        Those along axis 0.
    is_mask : bool
        Whether a mask selects them.
    """

    numbers: list[Variable]
    rows: AnyArray
    is_mask: bool


def _index_of_rows(node: Apply) -> _Index | None:
    """Return the items that a node selects, in the order of the rows; None if that is not known."""
    index = node.inputs[1:]
    if any(isinstance(item, slice) for item in getattr(node.op, "idx_list", ())):
        return None
    masks = [variable for variable in index if getattr(variable.type, "dtype", None) == "bool"]
    numbers = list(index[0].nonzero()) if len(index) == len(masks) == 1 else list(index)
    arrays = [value_of(number) for number in numbers]
    if any(array is None or array.ndim != 1 or array.dtype == bool for array in arrays):
        return None
    if all(isinstance(variable, Constant) for variable in index):
        numbers = [pt.constant(array) for array in arrays]
    rows = arrays[0]
    if rows is None or not len(rows) or rows[0] < 0 or (np.diff(rows) < (len(arrays) == 1)).any():
        return None
    return _Index(numbers, rows, bool(masks))


def _rows_of(operand: Variable, inputs: Sequence[Variable], last: int) -> Iterator[list[Variable]]:
    """Yield the leaves of equal numbers of rows, of all numbers that have a row of this index."""
    above = dict.fromkeys(ancestors([operand], blockers=inputs))
    leaves = [item for item in above if is_leaf(item) and not is_sparse(item)]
    lengths = {len(array_of(leaf)) for leaf in leaves if leaf.type.ndim}
    for length in sorted(item for item in lengths if item > last):
        yield [leaf for leaf in leaves if has_length(leaf, length)]


def _from_selected(
    operand: Variable, inputs: Sequence[Variable], leaves: Sequence[Variable], index: _Index
) -> Variable | None:
    """Return the selected items, computed from selected rows of leaves; None if shapes do not fit."""
    rows, *columns = index.numbers
    new = {item: item[rows] for item in leaves}
    if isinstance(rows, Constant):
        constants = [variable for variable in leaves if isinstance(variable, Constant)]
        new.update({item: pt.constant(array_of(item)[index.rows], item.name) for item in constants})
    count = pt.constant(len(index.rows), dtype="int64")
    try:
        chosen = substitute([operand], {**dict(zip(inputs, inputs)), **new})
        (chosen,) = freed(chosen, len(array_of(leaves[0])), count, [*inputs, *new.values()])
        places = pt.arange(chosen.shape[0]), *columns
        return chosen[places] if columns else chosen
    except (ValueError, IndexError, TypeError, AssertionError):
        return None


def _agree(old: Variable, new: Variable, inputs: Sequence[Variable], values: Sequence[Any]) -> bool:
    compute = pytensor.function(list(inputs), [old, new], mode="FAST_COMPILE", on_unused_input="ignore")
    try:
        first, second = compute(*values)
    except (ValueError, IndexError, TypeError, AssertionError):
        return False
    return first.shape == second.shape and np.allclose(first, second, rtol=1e-12, equal_nan=True)
