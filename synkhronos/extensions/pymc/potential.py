"""`rows_potential`: the sum of a log-probability over rows that the ranks share."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable, clone_get_equiv
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.type import RandomType

import synkhronos as synk
from synkhronos._text import listed
from synkhronos._typing import AnyArray
from synkhronos.extensions.pymc.operation import RowsSum
from synkhronos.extensions.pymc.rows import Rows


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
