"""Missing values: PyMC divides a variable into the observed items and a free variable for the others.

The variable itself becomes a join of both, which `joined_by_row` computes item by item: from constants,
and from the free values by their positions. The parameters of the observed items are a selection of the
rows of all items, which `selected_first` computes from the selected rows of the data.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Sequence

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.basic import AllocEmpty

from synkhronos._typing import AnyArray
from synkhronos.engines import names
from synkhronos.engines.names import Apply, Constant, Variable, ancestors, io_toposort
from synkhronos.extensions.pymc.leaves import array_of, freed, has_length, is_leaf, is_sparse
from synkhronos.extensions.pymc.potential import substitute

_SELECTIONS = (names.AdvancedSubtensor, names.AdvancedSubtensor1)


# Joins


def joined_by_row(graph: Variable, parameters: Sequence[Variable]) -> Variable:
    """Return a graph in which joins of constants and of free values are computed item by item."""
    writes = [
        node.outputs[0]
        for node in io_toposort(parameters, [graph])
        if isinstance(node.op, names.WRITES) and getattr(node.op, "set_instead_of_inc", False)
    ]
    for join in reversed(writes):  # the last of several writes to an array comes first
        new = _by_item(join, parameters)
        if new is not None:
            (graph,) = substitute([graph], {**dict(zip(parameters, parameters)), join: new})
    return graph


def _by_item(join: Variable, parameters: Sequence[Variable]) -> Variable | None:
    """Return the items of a join by their positions in what is joined; None if they are not known."""
    writes: list[Apply] = []
    base = join
    while base.owner and isinstance(base.owner.op, names.WRITES):
        writes.append(base.owner)
        base = base.owner.inputs[0]
    is_empty = base.owner and isinstance(base.owner.op, AllocEmpty)
    if not is_empty or not all(isinstance(one, Constant) for one in base.owner.inputs):
        return None
    shape = tuple(int(one.data) for one in base.owner.inputs)
    kind, position = np.full(shape, -1), np.zeros(shape, "int64")
    filled = np.zeros(shape, join.type.dtype)
    joined = [node.inputs[1] for node in reversed(writes)]
    for number, (node, value) in enumerate(zip(reversed(writes), joined)):
        if not all(isinstance(one, Constant) for one in node.inputs[2:]):
            return None
        kind = _written(node, kind, np.array(number))
        if isinstance(value, Constant):
            filled = _written(node, filled, array_of(value))
        elif {*_sources(value, parameters)} <= {*parameters}:
            items = np.arange((kind == number).sum())
            position = _written(node, position, items.reshape(-1, *shape[1:][: value.type.ndim - 1]))
        else:
            return None
    if (kind < 0).any():
        return None
    result = pt.constant(filled)
    for number, value in enumerate(joined):
        if not isinstance(value, Constant):
            items = value.ravel()[pt.constant(np.where(kind == number, position, 0))]
            result = pt.switch(pt.constant(kind == number), items, result)
    return result


def _sources(value: Variable, parameters: Sequence[Variable]) -> list[Variable]:
    above = [one for one in ancestors([value], blockers=parameters) if not isinstance(one, Constant)]
    return [one for one in above if one in parameters or one.owner is None]


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
    for node in io_toposort(inputs, [graph]):
        index = _constant_index(node) if isinstance(node.op, _SELECTIONS) else None
        if index is None or not len(index) or (np.diff(index) <= 0).any():
            continue
        if n_rows is not None and len(index) != n_rows:
            continue
        (old,) = node.outputs
        for leaves in _rows_of(node.inputs[0], inputs, index[-1]):
            new = _from_selected(node.inputs[0], inputs, leaves, index)
            if new is not None and _agree(old, new, inputs, values()):
                (graph,) = substitute([graph], {**dict(zip(inputs, inputs)), old: new})
                sources += leaves
                break
    return graph, sources


def select_first(variables: Sequence[Variable], values: Callable[[], Sequence[Any]]) -> None:
    """Have free variables, as those of missing items, depend on selected rows of the data alone.

    Parameters
    ----------
    variables : list of variables
        The free variables of a model, which are changed.
    values : callable
        Returns values of them.
    """
    for variable in variables:
        others = [one for one in variables if one is not variable]

        def values_of_others(others: Sequence[Variable] = others) -> list[Any]:
            return [value for one, value in zip(variables, values()) if one in others]

        for position, operand in enumerate(variable.owner.inputs if variable.owner else ()):
            by_row = joined_by_row(operand, others)
            selected, sources = selected_first(by_row, None, others, values_of_others)
            if sources:
                variable.owner.inputs[position] = selected


def _constant_index(node: Apply) -> AnyArray | None:
    """Return the numbers of the rows that a node selects; None if it depends on variables."""
    index = node.inputs[1:]
    if len(index) != 1 or not isinstance(index[0], Constant) or index[0].type.ndim != 1:
        return None
    array: AnyArray = index[0].data
    return np.flatnonzero(array) if array.dtype == bool else array


def _rows_of(operand: Variable, inputs: Sequence[Variable], last: int) -> Iterator[list[Variable]]:
    """Yield the leaves of equal numbers of rows, of all numbers that have a row of this index."""
    above = dict.fromkeys(ancestors([operand], blockers=inputs))
    leaves = [one for one in above if is_leaf(one) and not is_sparse(one)]
    lengths = {len(array_of(one)) for one in leaves if one.type.ndim}
    for length in sorted(one for one in lengths if one > last):
        yield [one for one in leaves if has_length(one, length)]


def _from_selected(
    operand: Variable, inputs: Sequence[Variable], leaves: Sequence[Variable], index: AnyArray
) -> Variable | None:
    """Return an operand, with selected rows of leaves; None if shapes do not fit."""
    new = {one: pt.constant(array_of(one)[index], dtype=one.type.dtype) for one in leaves}
    count = pt.constant(len(index), dtype="int64")
    try:
        chosen = substitute([operand], {**dict(zip(inputs, inputs)), **new})
        return freed(chosen, len(array_of(leaves[0])), count, inputs)[0]
    except (ValueError, IndexError, TypeError, AssertionError):
        return None


def _agree(old: Variable, new: Variable, inputs: Sequence[Variable], values: Sequence[Any]) -> bool:
    compute = pytensor.function(list(inputs), [old, new], mode="FAST_COMPILE", on_unused_input="ignore")
    try:
        first, second = compute(*values)
    except (ValueError, IndexError, TypeError, AssertionError):
        return False
    return first.shape == second.shape and np.allclose(first, second, rtol=1e-12, equal_nan=True)
