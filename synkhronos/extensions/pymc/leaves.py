"""The constants and shared variables of a graph, some of which are rows, and the number of rows in it.

What is computed from constants alone becomes a constant. So a column that a model standardizes, or the
basis functions of an approximate Gaussian process, are rows like any others.
"""

from __future__ import annotations

from typing import Any, Collection, Sequence

import numpy as np
import pytensor
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


def are_equal(one: Variable | None, other: Variable | None) -> bool:
    """Whether both are constants of the same value and type."""
    return isinstance(one, Constant) and isinstance(other, Constant) and one.equals(other)


def label_of(leaf: Variable) -> str:
    """Return the name of a leaf for messages, or its shape."""
    return repr(leaf.name) if leaf.name else f"a constant of shape {array_of(leaf).shape}"


# Constants


def folded(
    outputs: Sequence[Variable], kept: Collection[Variable] = (), *, only_shapes: bool = False
) -> list[Variable]:
    """Return a graph with constants for what is computed from constants alone, but not from `kept`."""
    constant: set[Variable] = set()
    others: dict[Variable, None] = dict.fromkeys(outputs)
    for node in io_toposort([], outputs):
        is_constant = [item in constant or _is_fixed(item) and item not in kept for item in node.inputs]
        if all(is_constant) and node.inputs and not isinstance(node.op, MeasurableOp):
            constant.update(node.outputs)
        else:
            others.update(dict.fromkeys(node.inputs))
    sources = dict.fromkeys(_source(other) for other in others if other in constant)
    if only_shapes:
        sources = dict.fromkeys(shape for shape in shapes_in(outputs) if shape in constant)
    wanted = [source for source in sources if _is_worth_a_constant(source)]
    if not wanted:
        return list(outputs)
    values = pytensor.function([], wanted, mode="FAST_COMPILE")()
    new = [pt.constant(value, dtype=variable.type.dtype) for variable, value in zip(wanted, values)]
    return substitute(outputs, dict(zip(wanted, new)))


def _is_fixed(variable: Variable) -> bool:
    return isinstance(variable, Constant)


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
    shapes, fixed = shapes_in(outputs), dict.fromkeys(outputs, False)
    for node in io_toposort([], outputs):
        known = [fixed.get(item, False) or _is_known(item) and item not in kept for item in node.inputs]
        is_fixed = bool(known) and all(known) and not isinstance(node.op, MeasurableOp)
        fixed.update(dict.fromkeys(node.outputs, is_fixed))
    arrays = [item for item in fixed if fixed[item] and item not in shapes]
    arrays = [
        array for array in arrays if getattr(array.type, "ndim", False) and _is_worth_a_constant(array)
    ]
    if not arrays:
        return list(outputs), {}
    lengths = pytensor.function([], [array.shape[0] for array in arrays], mode="FAST_COMPILE")()
    by_row = {array for array, length in zip(arrays, lengths) if n_rows in (None, length)}
    wanted = [item for item in walk(outputs, lambda one: () if one in by_row else _inputs(one))]
    wanted = [item for item in dict.fromkeys(wanted) if item in by_row]
    values = pytensor.function([], wanted, mode="FAST_COMPILE")()
    new = {item: pt.constant(value, _name_of(item)) for item, value in zip(wanted, values)}
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
                new = node.op.make_node(*inputs).outputs
            copies.update(zip(node.outputs, new))
    return [copies.get(output, output) for output in outputs]


def _inner_graph(op: OpFromGraph) -> Any:
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
