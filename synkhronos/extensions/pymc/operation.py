"""`RowsSum`: the operation for graphs that is a sum over the rows of all ranks.

Its outputs are the sum and the gradient, so both are computed only once. Where nothing uses the
gradient, compilation replaces it by an operation without.

PyTensor keeps every operation that it has ever rewritten. So the rows are held by the nodes of graphs,
and end with the last graph and compiled function. Numba keeps every function of the process, with the
nodes that it was made of. So in a function that is compiled by Numba, the storage of the sum holds the
rows, in place of the node.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, Iterable, Sequence

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.graph.traversal import ancestors
from pytensor.link.numba.dispatch.basic import numba_funcify
from pytensor.tensor.rewriting.basic import register_specialize

from synkhronos import SynkhronosError
from synkhronos.extensions.pymc.compiled import operation

if TYPE_CHECKING:
    from pytensor.graph.fg import FunctionGraph

    from synkhronos.extensions.pymc.rows import EvaluatedSum


class RowsSum(Op):
    """The sum over the rows, and perhaps its gradient. It compares equal only to itself.

    Parameters
    ----------
    rows : EvaluatedSum
        The rows.
    with_gradient : bool, default: True
        Whether the gradient with respect to each differentiable parameter follows.
    """

    def __init__(self, rows: EvaluatedSum, with_gradient: bool = True) -> None:
        self._rows, self._name, self.with_gradient = weakref.ref(rows), rows.name, with_gradient
        self._types = [parameter.type for parameter in rows.parameters]
        self._wrt, self._dtype = rows.wrt if with_gradient else [], rows.dtype
        self._no_gradient = rows.on_ranks.no_gradient
        self.alone = RowsSum(rows, False) if with_gradient else self

    @property
    def rows(self) -> EvaluatedSum:
        """The rows, which every node with this operation holds."""
        rows = self._rows()
        if rows is None:
            raise SynkhronosError(
                f"{self._name}: its rows were freed with its model and the functions that PyTensor has "
                f"compiled of it; keep one of them"
            )
        return rows

    def __reduce__(self) -> Any:
        return type(self), (self.rows, self.with_gradient)

    def __str__(self) -> str:
        return f"{type(self).__name__}{{{self._name}}}"

    def do_constant_folding(self, fgraph: FunctionGraph, node: Apply) -> bool:
        return False

    def make_node(self, *values: Any) -> Apply:
        inputs = [kind.filter_variable(value) for kind, value in zip(self._types, values)]
        gradients = [inputs[index].type() for index in self._wrt]
        node = Apply(self, inputs, [pt.scalar(dtype=self._dtype), *gradients])
        node.tag.rows = self.rows
        return node

    def infer_shape(self, *context: Any) -> list[Any]:
        shapes = context[-1]  # PyTensor 2 passes the graph as well
        return [(), *(shapes[index] for index in self._wrt)]

    def perform(self, node: Apply, inputs: list[np.ndarray], output_storage: list[list[Any]]) -> None:
        flat = self.rows.vector(inputs, self.with_gradient)
        shapes = [(), *(inputs[index].shape for index in self._wrt)]
        parts = np.split(flat, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
        for storage, output, part, shape in zip(output_storage, node.outputs, parts, shapes):
            storage[0] = np.asarray(part.reshape(shape), output.type.dtype)

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        connected = range(len(node.inputs)) if self._no_gradient else self._wrt
        return [[index in connected] * len(node.outputs) for index in range(len(node.inputs))]

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], cotangents: Sequence[Variable]
    ) -> list[Variable]:
        if self._no_gradient:
            raise NotImplementedError(f"{self._name}: there is no gradient: {self._no_gradient}")
        if any(not isinstance(cotangent.type, DisconnectedType) for cotangent in cotangents[1:]):
            raise NotImplementedError(
                f"{self._name}: only the first derivatives of a sum over the rows of all ranks can "
                f"be computed; there is no Hessian"
            )
        results = [DisconnectedType()() for _ in inputs]
        for index, gradient in zip(self._wrt, outputs[1:]):
            results[index] = cotangents[0] * gradient
        return results

    L_op = pullback  # its name in PyTensor 2


def sums_over_rows(graph: Iterable[Variable]) -> list[Any]:
    """Return the sums over rows in a graph."""
    nodes = [variable.owner for variable in ancestors(graph) if variable.owner]
    return list(dict.fromkeys(node.op.rows for node in nodes if isinstance(node.op, RowsSum)))


@register_specialize
@node_rewriter([RowsSum])
def local_sum_without_gradient(fgraph: FunctionGraph, node: Apply) -> dict[Variable, Variable] | None:
    """Compute the sum alone where nothing uses the gradient."""
    if not node.op.with_gradient or any(fgraph.clients[output] for output in node.outputs[1:]):
        return None
    return {node.outputs[0]: node.op.alone(*node.inputs)}


@numba_funcify.register(RowsSum)
def numba_funcify_of_rows(op: Op, node: Apply, storage_map: Any = None, **kwargs: Any) -> Any:
    """Return a function that Numba code calls, and that calls Python only where it has to."""
    rows = op.rows
    storage = (storage_map or {}).get(node.outputs[0])
    if storage is not None:  # which belongs to the compiled function; there is none in inner graphs
        storage.append(rows)
        vars(node.tag).pop("rows", None)
    value, *gradients = [output.type for output in node.outputs]

    def in_python(values: Sequence[np.ndarray]) -> np.ndarray:
        return np.array(op.rows.vector(values, op.with_gradient), np.float64)

    return operation(
        rows.resident[op.with_gradient].record,
        [variable.type for variable in node.inputs],
        value,
        list(zip(rows.wrt, gradients)),
        in_python,
    )
