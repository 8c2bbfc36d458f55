"""The constants and shared variables of a graph, some of which are rows, and the number of rows in it.

What is computed from constants alone becomes a constant. So a column that a model standardizes, or the
basis functions of an approximate Gaussian process, are rows like any others.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Collection, Sequence

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
    value: AnyArray = pytensor.function([], variable, mode="FAST_COMPILE")()
    return value


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
    nodes = [node for node in io_toposort([], outputs) if node.outputs[0] not in constant]
    others = [*outputs, *itertools.chain(*(node.inputs for node in nodes))]
    sources = dict.fromkeys(_source(other) for other in others if other in constant)
    if only_shapes:
        sources = dict.fromkeys(shape for shape in shapes_in(outputs) if shape in constant)
    wanted = [source for source in sources if _is_worth_a_constant(source)]
    new = {item: pt.constant(value, dtype=item.type.dtype) for item, value in _valued(wanted)}
    return substitute(outputs, new)


def _computed_from(outputs: Sequence[Variable], is_known: Callable[[Variable], bool]) -> set[Variable]:
    """Return what a graph computes from known variables alone."""
    found: set[Variable] = set()
    for node in io_toposort([], outputs):
        is_computed = bool(node.inputs) and not isinstance(node.op, MeasurableOp)
        if is_computed and all(item in found or is_known(item) for item in node.inputs):
            found.update(node.outputs)
    return found


def _valued(variables: Sequence[Variable]) -> list[tuple[Variable, AnyArray]]:
    """Return variables with the values that are computed for them."""
    if not variables:
        return []
    return list(zip(variables, pytensor.function([], list(variables), mode="FAST_COMPILE")()))


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
    lengths = [int(length) for _, length in _valued([array.shape[0] for array in arrays])]
    by_row = {array for array, length in zip(arrays, lengths) if n_rows in (None, length)}
    above = walk(outputs, lambda item: () if item in by_row else _inputs(item))
    wanted = [item for item in dict.fromkeys(above) if item in by_row]
    new = {item: pt.constant(value, _name_of(item)) for item, value in _valued(wanted)}
    return substitute(outputs, new), {made: item for item, made in new.items()}


def _name_of(computed: Variable) -> str | None:
    names_of = [item.name for item in ancestors([computed]) if isinstance(item, SharedVariable)]
    found = [name for name in names_of if name]
    return computed.name or (f"the rows of {', '.join(found)}" if found else None)


def _inputs(variable: Variable) -> Sequence[Variable]:
    return variable.owner.inputs if variable.owner else ()


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
