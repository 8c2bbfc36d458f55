"""`rows_potential`, and `RowsSum`: the operation for graphs that is a sum over the rows of all ranks.

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
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping, Sequence

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply, Variable, clone_get_equiv
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.link.numba.dispatch.basic import numba_funcify
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.rewriting.basic import register_specialize

import synkhronos as synk
from synkhronos._text import listed
from synkhronos._typing import AnyArray
from synkhronos.extensions.pymc.compiled import operation
from synkhronos.extensions.pymc.rows import EvaluatedSum, Rows

if TYPE_CHECKING:
    from pytensor.graph.fg import FunctionGraph


def rows_potential(
    log_prob: Callable[..., Variable] | Variable,
    inputs: Sequence[Variable],
    data: Sequence[Any] | Mapping[Variable, Any],
    *,
    mode: Any = None,
    name: str | None = None,
) -> Variable:
    """Return the sum of a log-probability over rows of data, which all ranks compute together.

    Use it in a PyMC model as ``pm.Potential(name, rows_potential(...))``, in place of an observed
    variable. It has a gradient, so NUTS, ADVI and MAP can use it.

    Parameters
    ----------
    log_prob : callable or variable
        Called with variables for the inputs, followed by variables for the data, it returns a variable:
        an item for each row, or their sum. Instead of a callable, a variable that depends on the inputs
        and on the variables in `data`.
    inputs : list of variables
        The parameters, such as random variables of the model. Every rank gets their values.
    data : list of array-like, or dict
        Arrays that have a row for each observation on axis 0, all of the same number of rows. They are
        copied to shared memory once, unless they are `Data` or ``numpy.memmap``. With a variable as
        `log_prob`, a dictionary: the array by the variable that stands for it.
    mode : str or Mode, optional
        The mode of PyTensor in which the ranks compile; by default ``"NUMBA"``, with which evaluations
        need no Python, or the mode of PyTensor's settings if they name one.
    name : str, optional
        A name for messages.

    Returns
    -------
    variable
        A scalar, in a graph that depends on `inputs`.

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used.
    TypeError
        If an argument is of the wrong kind, or the dtype of a `Data` differs from the dtype of its
        variable.
    ValueError
        If the numbers of rows differ, or the log-probability draws random numbers. In the first three
        evaluations where it is finite, if it is not a sum over the rows.
    MismatchError
        In one of these, if the sum over all ranks differs from the sum on one process.
    SynkhronosError
        In an evaluation by a process that was forked from this one, as by ``pm.sample(cores=2)``, or by
        a signal handler during another evaluation. An evaluation in another thread waits.

    Examples
    --------
    >>> import numpy as np
    >>> import pytensor.tensor as pt
    >>> import synkhronos as synk
    >>> from synkhronos.extensions.pymc import rows_potential
    >>> synk.fork(2)
    2
    >>> rows = np.arange(6.0)
    >>> mean = pt.dscalar("mean")
    >>> total = rows_potential(lambda mean, row: -pt.sqr(row - mean), [mean], [rows])
    >>> print(total.eval({mean: 2.0}), pt.grad(total, mean).eval({mean: 2.0}))
    -19.0 6.0
    >>> synk.close()
    """
    name = name or "rows_potential"
    parameters = [_parameter(name, position, variable) for position, variable in enumerate(inputs)]
    if isinstance(log_prob, Variable):
        by_variable = _check_mapping(name, data)
        variables = [like(variable, variable.name, variable.type.shape) for variable in by_variable]
        replaced = dict([*zip(inputs, parameters), *zip(by_variable, variables)])
        (value,), arrays = substitute([log_prob], replaced), list(by_variable.values())
    else:
        arrays = [_as_array(name, position, array) for position, array in enumerate(data)]
        variables = [like(item, f"data[{position}]", item.shape) for position, item in enumerate(arrays)]
        value = log_prob(*parameters, *variables)
        if not isinstance(value, Variable):
            raise TypeError(f"{name}: log_prob: expected that it returns a variable, got {value!r}")
    differentiable = [parameter.type.dtype.startswith("float") for parameter in parameters]
    return sum_over_ranks(
        Rows(name, total_of(name, value), parameters, differentiable, variables, arrays, mode),
        inputs,
    )


def sum_over_ranks(rows: Rows, values: Sequence[Variable]) -> Variable:
    """Return a variable for the sum over the rows, for these values of the parameters."""
    return RowsSum(rows)(*values, return_list=True)[0]


def total_of(name: str, value: Variable) -> Variable:
    """Return the sum of a log-probability of each row, in floats; raise if it draws random numbers."""
    if _draws(value):  # perhaps only to know the shapes of the draws
        value = rewrite_graph(value, include=("canonicalize", "ShapeOpt"))
    drawn = _draws(value)
    if drawn:
        remedy = "give rows_potential the random variables of the model as `inputs`"
        if "Minibatch" in drawn:
            remedy = "observe all rows in place of a minibatch"
        elif any(item.startswith("Simulator") for item in drawn):
            remedy = "leave out the variable of the simulator, by observed=[...]"
        raise ValueError(
            f"{name}: the log-probability draws random numbers, by {listed(drawn)}, so its rows cannot "
            f"be divided: {remedy}"
        )
    total = value.sum() if value.type.ndim else value
    return total if total.type.dtype.startswith("float") else pt.cast(total, "floatX")


def _draws(value: Variable) -> list[str]:
    """Return the names of the operations in a graph that draw random numbers."""
    nodes = {variable.owner for variable in ancestors([value]) if variable.owner}
    return sorted(
        {
            str(node.op)
            for node in nodes
            if any(isinstance(variable.type, RandomType) for variable in node.inputs)
        }
    )


def substitute(outputs: Sequence[Variable], replaced: Mapping[Variable, Variable]) -> list[Variable]:
    """Return a copy of a graph with other variables, whose types may have other extents.

    ``clone_replace`` would insist on the former extents.
    """
    copies = clone_get_equiv(
        list(replaced), outputs, copy_inputs=False, copy_orphans=False, memo=dict(replaced), strict=False
    )
    return [copies[output] if output.owner or output in replaced else output for output in outputs]


def like(item: Any, name: str | None, shape: Sequence[int | None]) -> Variable:
    """Return a variable for rows of the dtype of an array or a variable, of any number."""
    return pt.TensorType(str(item.dtype), (None, *shape[1:]))(name)  # a name may look like a dtype


def _parameter(name: str, position: int, item: Any) -> Variable:
    if not isinstance(item, Variable) or not hasattr(item.type, "ndim"):
        raise TypeError(f"{name}: inputs[{position}]: expected a tensor variable, got {item!r}")
    return item.type(item.name)


def _check_mapping(name: str, data: Any) -> Mapping[Variable, Any]:
    if not isinstance(data, Mapping):
        raise TypeError(
            f"{name}: data: expected a dictionary of arrays by the variable that stands for them, as "
            f"log_prob is a variable, got {type(data).__name__}"
        )
    for array in data:
        if not isinstance(array, Variable) or not array.type.ndim:
            raise TypeError(f"{name}: data: expected variables of at least one dimension, got {array!r}")
    return data


def _as_array(name: str, position: int, rows: Any) -> synk.Data | AnyArray:
    array = rows if isinstance(rows, (synk.Data, np.ndarray)) else np.asarray(rows)
    if not array.ndim or array.dtype.kind not in "biuf":
        raise TypeError(
            f"{name}: data[{position}]: expected an array of numbers with rows, got {rows!r}"
        )
    return array


# The operation


class RowsSum(Op):  # type: ignore[misc]
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
            raise synk.SynkhronosError(
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

    def perform(self, node: Apply, inputs: list[AnyArray], output_storage: list[list[Any]]) -> None:
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


@register_specialize  # type: ignore[untyped-decorator]
@node_rewriter([RowsSum])  # type: ignore[untyped-decorator]
def local_sum_without_gradient(fgraph: FunctionGraph, node: Apply) -> dict[Variable, Variable] | None:
    """Compute the sum alone where nothing uses the gradient."""
    if not node.op.with_gradient or any(fgraph.clients[output] for output in node.outputs[1:]):
        return None
    return {node.outputs[0]: node.op.alone(*node.inputs)}


@numba_funcify.register(RowsSum)  # type: ignore[untyped-decorator]
def numba_funcify_of_rows(op: Op, node: Apply, storage_map: Any = None, **kwargs: Any) -> Any:
    """Return a function that Numba code calls, and that calls Python only where it has to."""
    rows = op.rows
    storage = (storage_map or {}).get(node.outputs[0])
    if storage is not None:  # which belongs to the compiled function; there is none in inner graphs
        storage.append(rows)
        vars(node.tag).pop("rows", None)
    value, *gradients = [output.type for output in node.outputs]

    def in_python(values: Sequence[AnyArray]) -> AnyArray:
        return np.array(op.rows.vector(values, op.with_gradient), np.float64)

    return operation(
        rows.resident[op.with_gradient].record,
        [variable.type for variable in node.inputs],
        value,
        list(zip(rows.wrt, gradients)),
        in_python,
    )
