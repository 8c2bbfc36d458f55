"""The graphs of a model, rewritten so that its rows are those of constants and shared variables.

What is computed from constants alone becomes a constant. So a column that a model standardizes, or the
basis functions of an approximate Gaussian process, are rows like any others.

PyMC divides a variable with missing values into the observed items and a free variable for the others.
The variable itself becomes a join of both, which `joined_by_row` computes item by item: from constants,
and from the free values by their positions. The parameters of the observed items are a selection of the
rows of all items, which `selected_first` computes from the selected rows of the data.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Collection, Iterable, Iterator, NamedTuple, Sequence

import numpy as np
import pytensor
import pytensor.sparse.math as sparse_math
import pytensor.tensor as pt
from pymc.logprob.abstract import MeasurableOp
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.traversal import walk
from pytensor.tensor.basic import AllocEmpty

from synkhronos._typing import AnyArray
from synkhronos.engines import names
from synkhronos.engines.names import (
    Apply,
    Constant,
    SharedVariable,
    Variable,
    ancestors,
    io_toposort,
)
from synkhronos.extensions.pymc.potential import substitute

#: Operations that select items by masks or indices
SELECTIONS = (names.AdvancedSubtensor, names.AdvancedSubtensor1)


def is_leaf(variable: Variable) -> bool:
    """Whether a variable is a tensor that has a value."""
    is_tensor = isinstance(variable.type, names.TensorType) or has_dims(variable)
    return is_tensor and isinstance(variable, (Constant, SharedVariable))


def has_dims(variable: Variable) -> bool:
    """Whether the dimensions of a variable have names."""
    return hasattr(variable.type, "dims")


def is_sparse(variable: Variable) -> bool:
    """Whether a variable is a sparse matrix."""
    return hasattr(variable.type, "format")


def array_of(leaf: Variable) -> Any:
    """Return the value of a constant or a shared variable."""
    return leaf.data if isinstance(leaf, Constant) else leaf.get_value(borrow=True)


def value_of(variable: Variable) -> AnyArray | None:
    """Return the value of what is computed from leaves alone, or None."""
    if is_leaf(variable):
        return np.asarray(array_of(variable))
    sources = [source for source in ancestors([variable]) if source.owner is None]
    if not isinstance(variable.type, names.TensorType) or not all(map(_is_known, sources)):
        return None
    return _values([variable])[0]


def has_length(leaf: Variable, length: int) -> bool:
    """Whether a leaf has this number of items on axis 0."""
    return leaf.type.ndim > 0 and array_of(leaf).shape[0] == length


def label_of(leaf: Variable) -> str:
    """Return the name of a leaf for messages, or its shape."""
    return repr(leaf.name) if leaf.name else f"a constant of shape {array_of(leaf).shape}"


# Constants


def folded(
    outputs: Sequence[Variable], kept: Collection[Variable] = (), *, only_shapes: bool = False
) -> list[Variable]:
    """Return a graph with constants for what is computed from constants alone, but not from `kept`."""
    constant = _computed_from(outputs, lambda item: isinstance(item, Constant) and item not in kept)
    if only_shapes:
        return _with_constants(outputs, shapes_in(outputs) & constant)[0]
    return _with_constants(outputs, map(_source, _first_of(constant, outputs)))[0]


def computed_once(
    outputs: Sequence[Variable], n_rows: int | None = None, kept: Collection[Variable] = ()
) -> tuple[list[Variable], dict[Variable, Variable]]:
    """Return a graph with constants for rows that are computed from leaves alone, and what they replace.

    Parameters
    ----------
    outputs : list of variables
    n_rows : int, optional
        The number of rows, on axis 0; by default, any.
    kept : list of variables
        Leaves that remain in the graph.

    Returns
    -------
    outputs : list of variables
    replaced : dict
        What was computed in the graph, by the constant that has its value.
    """
    found = _computed_from(outputs, lambda item: _is_known(item) and item not in kept)
    found -= shapes_in(outputs)
    arrays = [item for item in found if _is_worth_a_constant(item) and item.type.ndim]
    lengths = _values([array.shape[0] for array in arrays])
    by_row = {array for array, length in zip(arrays, lengths) if n_rows in (None, int(length))}
    return _with_constants(outputs, _first_of(by_row, outputs))


def _computed_from(outputs: Sequence[Variable], is_known: Callable[[Variable], bool]) -> set[Variable]:
    """Return what a graph computes from known variables alone."""
    found: set[Variable] = set()
    for node in io_toposort([], outputs):
        is_computed = bool(node.inputs) and not isinstance(node.op, MeasurableOp)
        if is_computed and all(item in found or is_known(item) for item in node.inputs):
            found.update(node.outputs)
    return found


def _first_of(found: Collection[Variable], outputs: Sequence[Variable]) -> list[Variable]:
    """Return those of some variables that are used by others, or are outputs."""
    above = walk(outputs, lambda item: () if item in found else item.owner and item.owner.inputs)
    return [item for item in dict.fromkeys(above) if item in found]


def _with_constants(
    outputs: Sequence[Variable], computed: Iterable[Variable]
) -> tuple[list[Variable], dict[Variable, Variable]]:
    """Return a graph with constants for what it computes, and what each of them replaces."""
    wanted = list(filter(_is_worth_a_constant, dict.fromkeys(computed)))
    new = {
        item: pt.constant(value, _name_of(item), dtype=item.type.dtype)
        for item, value in zip(wanted, _values(wanted))
    }
    return substitute(outputs, new), {made: item for item, made in new.items()}


def _values(variables: Sequence[Variable]) -> list[AnyArray]:
    """Return the values that are computed from leaves alone."""
    if not variables:
        return []
    return list(pytensor.function([], list(variables), mode="FAST_COMPILE")())


def _is_known(variable: Variable) -> bool:
    return isinstance(variable, Constant) or is_leaf(variable)


def _source(variable: Variable) -> Variable:
    """Return what a variable is a view of, with the same axis 0, so that no array is stored twice."""
    while variable.owner and isinstance(variable.owner.op, names.DimShuffle):
        if variable.owner.op.new_order[:1] != (0,):
            break
        variable = variable.owner.inputs[0]
    return variable


def _is_worth_a_constant(variable: Variable) -> bool:
    if variable.owner is None or not isinstance(variable.type, names.TensorType) or is_sparse(variable):
        return False
    return not (isinstance(variable.owner.op, names.Alloc) and variable.owner.inputs[0].type.ndim == 0)


def _name_of(computed: Variable) -> str | None:
    names_of = [item.name for item in ancestors([computed]) if isinstance(item, SharedVariable)]
    found = [name for name in names_of if name]
    return computed.name or (f"the rows of {', '.join(found)}" if found else None)


# The number of rows


def rows_first(graph: Variable, n_rows: int) -> Variable:
    """Return a graph with the rows of its constants on axis 0."""
    new = {}
    for item in ancestors([graph]):
        if isinstance(item, Constant) and is_leaf(item) and not is_sparse(item) and item.type.ndim > 1:
            axes = [axis for axis, extent in enumerate(item.data.shape) if extent == n_rows]
            if len(axes) == 1 and axes[0]:
                moved = np.ascontiguousarray(np.moveaxis(item.data, axes[0], 0))
                new[item] = pt.moveaxis(pt.constant(moved), 0, axes[0])
    return substitute([graph], new)[0]


def shapes_in(outputs: Sequence[Variable]) -> set[Variable]:
    """Return the variables that are shapes, or extents in them."""
    found: set[Variable] = set()
    for node in io_toposort([], outputs):
        found.update(node.inputs[index] for index in _positions(node))
    return found


def freed(
    outputs: Sequence[Variable], n_rows: int, count: Variable, inputs: Sequence[Variable] = ()
) -> list[Variable]:
    """Return a graph with another number of rows in its shapes.

    Parameters
    ----------
    outputs : list of variables
    n_rows : int
        The number of rows so far, a constant.
    count : variable
        The number of rows that takes its place.
    inputs : list of variables, optional
        Variables that are kept, with what they are computed from.
    """
    copies: dict[Variable, Variable] = {}
    for node in io_toposort(inputs, outputs):
        inputs = [copies.get(variable, variable) for variable in node.inputs]
        positions = _positions(node)
        for index in positions:
            inputs[index] = _with_count(inputs[index], n_rows, count)
        if any(new is not old for new, old in zip(inputs, node.inputs)):
            if isinstance(node.op, OpFromGraph) and not _accepts(node.op, inputs):
                graph = _inner_graph(node.op)
                inner = dict(zip(graph.inputs, inputs))
                new = freed(substitute(graph.outputs, inner), n_rows, count)
            else:
                op = _of_any_rows(node, inputs, n_rows) if isinstance(node.op, names.Scan) else node.op
                new = op.make_node(*inputs).outputs
            copies.update(zip(node.outputs, new))
    return [copies.get(output, output) for output in outputs]


def _of_any_rows(node: Apply, inputs: Sequence[Variable], n_rows: int) -> Any:
    """Return the loop of a node, with steps that take any number of rows if the inputs have another."""
    op, graph = node.op, _inner_graph(node.op)
    given = graph.inputs
    new = {item: _of_any_length(item, n_rows) for item in given if n_rows in _extents(item)}
    if not new or all(_extents(item) == _extents(old) for item, old in zip(inputs, node.inputs)):
        return op
    old, longest = next(iter(new.items()))
    count = longest.shape[_extents(old).index(n_rows)]
    given = [new.get(item, item) for item in given]
    steps = freed(substitute(graph.outputs, {**dict(zip(given, given)), **new}), n_rows, count, given)
    options = {name: getattr(op, name) for name in ("mode", "truncate_gradient", "name", "allow_gc")}
    return names.Scan(given, steps, op.info, strict=op.strict, **options)


def _of_any_length(variable: Variable, n_rows: int) -> Variable:
    kind = variable.type
    return kind.clone(shape=[None if extent == n_rows else extent for extent in kind.shape])()


def _extents(variable: Variable) -> tuple[int | None, ...]:
    return getattr(variable.type, "shape", ())


def _inner_graph(op: Any) -> Any:
    """Return the graph inside an operation, which can be copied."""
    return op.fgraph.unfreeze() if hasattr(op.fgraph, "unfreeze") else op.fgraph  # PyTensor 3, or 2


def _accepts(op: OpFromGraph, inputs: Sequence[Variable]) -> bool:
    """Whether an operation takes inputs as they are, without a check of their extents."""
    return all(variable.type.is_super(new.type) for variable, new in zip(op.inner_inputs, inputs))


def _positions(node: Apply) -> list[int]:
    """Return which inputs of a node are a shape, or an extent."""
    op = node.op
    if isinstance(op, names.WITH_EXTENTS):
        return list(range(1, len(node.inputs)))
    if isinstance(op, AllocEmpty):
        return list(range(len(node.inputs)))
    if isinstance(op, names.Reshape):
        return [1]
    if isinstance(op, names.Scan):  # the steps, and the lengths of results
        lengths = [node.inputs[0], *op.outer_nitsot(node.inputs)]
        return [index for index, variable in enumerate(node.inputs) if variable in lengths]
    if getattr(op, "extended_signature", "") is None:
        op = getattr(op, "base_rv_op", None)  # of a truncated distribution, whose inputs come first
    size = op.size_param(node) if hasattr(op, "size_param") else None
    return [] if size is None else [node.inputs.index(size)]


def _with_count(shape: Variable, n_rows: int, count: Variable) -> Variable:
    """Return a shape, or an extent, with the count in place of the number of rows."""
    if not isinstance(shape.type, names.TensorType):
        return shape  # None, for any extent
    if shape.type.ndim == 0:
        return count if _is_number(shape, n_rows) else shape
    if isinstance(shape, Constant):
        items = [pt.constant(int(length), dtype="int64") for length in shape.data]
    elif shape.owner and isinstance(shape.owner.op, names.MakeVector):
        items = shape.owner.inputs
    else:
        return shape
    if not any(_is_number(item, n_rows) for item in items):
        return shape
    return pt.stack([count if _is_number(item, n_rows) else item for item in items])


def _is_number(variable: Variable, number: int) -> bool:
    return isinstance(variable, Constant) and variable.type.ndim == 0 and int(variable.data) == number


# Products of a sparse matrix of data: ranks can share rows of dense arrays only. So each row of the
# matrix is stored as values and their columns, with zeros up to the entries of the longest row.

_MOST = 4  # stored entries per entry of the matrix

_PRODUCTS = (sparse_math.StructuredDot, sparse_math.Dot)


def padded(title: str, graph: Variable, n_rows: int) -> Variable:
    """Return a graph with dense arrays for the sparse matrices that have this number of rows.

    Raises
    ------
    ValueError
        If such a matrix is not the left factor of a product with a dense matrix or vector, or if its
        longest row has so many entries that the arrays would be too large.
    """
    products = {}
    for variable in ancestors([graph]):
        if variable.owner and isinstance(variable.owner.op, _PRODUCTS) and not is_sparse(variable):
            left, right = variable.owner.inputs
            if _has_rows(left, n_rows) and not is_sparse(right):
                products[variable] = _product(title, left, right, variable.type.dtype)
    for product in products:  # a factor may contain another product
        graph = substitute([graph], {product: products[product]})[0]
    left_over = [variable for variable in ancestors([graph]) if _has_rows(variable, n_rows)]
    if left_over:
        raise ValueError(
            f"{title}: expected that a sparse matrix of data is the left factor of pytensor.sparse.dot "
            f"or structured_dot, with a dense one, got another use of the matrix of shape "
            f"{array_of(left_over[0]).shape}; use a dense array, as by its toarray()"
        )
    return graph


def _has_rows(variable: Variable, n_rows: int) -> bool:
    return is_sparse(variable) and is_leaf(variable) and array_of(variable).shape[0] == n_rows


def _product(title: str, left: Variable, right: Variable, dtype: str) -> Variable:
    matrix = array_of(left).tocsr()
    counts = np.diff(matrix.indptr)
    longest = max(1, int(counts.max()))
    if matrix.shape[0] * longest > _MOST * max(matrix.nnz, matrix.shape[0]):
        raise ValueError(
            f"{title}: the rows of the sparse matrix of shape {matrix.shape} have {counts.mean():.3g} "
            f"entries on average, and up to {longest}. Ranks can divide it if no row has more than "
            f"{_MOST} times the average; split it into two matrices by columns, one of them dense"
        )
    is_entry = np.arange(longest) < counts[:, None]
    values = np.zeros(is_entry.shape, matrix.dtype)
    columns = np.zeros(is_entry.shape, "int64")
    values[is_entry], columns[is_entry] = matrix.data, matrix.indices
    chosen = right[pt.constant(columns)]
    weights = pt.constant(values)
    product = (weights if right.type.ndim == 1 else weights[:, :, None]) * chosen
    return pt.cast(product.sum(axis=1), dtype)


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
