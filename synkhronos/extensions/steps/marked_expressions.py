"""Marks on expressions whose values over all ranks the updates of a training step use."""

from __future__ import annotations

from typing import Any, Iterable, Sequence

from synkhronos.engines.analysis.graphs import inputs_first
from synkhronos.engines.names import SharedVariable, Variable, ViewOp
from synkhronos.extensions._parameters import checked_parameters, gradients_of

#: The operations with which the values of the ranks can be combined.
OPERATIONS = ("avg", "sum", "min", "max")


class Mark(ViewOp):
    """An operation that returns its input; a training step replaces its output in the updates.

    Parameters
    ----------
    op : str or None
        How the values of the ranks are combined; None to combine them like the gradients of the loss.
    shape : tuple of int
        The shape of the value.
    """

    __props__ = ("op", "shape")

    def __init__(self, op: str | None, shape: tuple[int, ...]) -> None:
        self.op, self.shape = op, shape


def gradients(loss: Variable, params: Iterable[SharedVariable]) -> list[Variable]:
    """Return the gradients of a loss, marked for a training step.

    Use it in place of ``theano.grad`` if a step does not find the gradients in your updates by itself,
    or to build updates by hand. In a plain ``theano.function`` the marks have no effect.

    Parameters
    ----------
    loss : scalar variable, or list of variables
        The loss; or expressions of gradients, one for each parameter.
    params : list of shared variables
        Distinct float tensors. Their shapes must not change afterwards.

    Returns
    -------
    list of variables
        One gradient per parameter, in its dtype.

    Raises
    ------
    TypeError
        If the loss is not a float expression, or a parameter is not a shared float tensor.
    ValueError
        If the loss is not a scalar or does not depend on a parameter, `params` is empty or has
        duplicates, or gradients do not match `params`.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> import theano.tensor as T
    >>> from synkhronos.extensions import train
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x, w = T.dvector("x"), theano.shared(4.0, name="w")
    >>> [gradient] = train.gradients(T.sqr(x - w).mean(), [w])
    >>> step = train.parallel_function([x], updates=[(w, w - 0.25 * gradient)])
    >>> for _ in range(2):
    ...     _ = step([1.0, 2.0, 3.0])  # two rows on this process, one on the worker
    >>> synk.gather(w)
    array([2.5, 2.5])
    >>> synk.close()
    """
    params = checked_parameters(params)
    expressions = gradients_of(loss, params)
    shapes = [param.get_value(borrow=True).shape for param in params]
    return [_marked(expression, None, shape) for expression, shape in zip(expressions, shapes)]


def reduced(expression: Variable, op: str = "avg", shape: Sequence[int] = ()) -> Variable:
    """Mark an expression whose value over all ranks the updates of a training step use.

    Each rank computes the expression on its own rows. The values are combined together with the
    gradients, and updates and outputs that use the expression get the combined value. In a plain
    ``theano.function`` the mark has no effect.

    Parameters
    ----------
    expression : variable
        A tensor, computed from the rows, as in ``reduced(x.shape[0], "sum")`` for the number of all
        rows of the minibatch.
    op : {"avg", "sum", "min", "max"}
        ``"avg"`` is weighted by the numbers of rows, and needs a float.
    shape : tuple of int, optional
        The shape of the value, if it is not a scalar.

    Returns
    -------
    variable
        The same tensor, marked.

    Raises
    ------
    TypeError
        If `expression` is not a tensor variable, `op` is not a str, or the dtype cannot be averaged.
    ValueError
        If the operation does not exist, or `shape` has another number of dimensions.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> import theano.tensor as T
    >>> from synkhronos.extensions import train
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x, largest = T.dvector("x"), theano.shared(0.0, name="largest")
    >>> scale = train.reduced(abs(x).max(), "max")
    >>> step = train.parallel_function([x], x.mean(), updates=[(largest, scale**2)])
    >>> step([1.0, 2.0, -3.0])
    array(0.)
    >>> largest.get_value()
    array(9.)
    >>> synk.close()
    """
    if not isinstance(expression, Variable) or not hasattr(expression.type, "broadcastable"):
        raise TypeError(
            f"reduced: expected a tensor variable, got {type(expression).__name__}; numbers are the "
            f"same on every rank and need no mark"
        )
    check_operation(op, "reduced", "op", expression.dtype)
    shape = tuple(int(extent) for extent in shape)
    if len(shape) != expression.ndim:
        raise ValueError(
            f"reduced: shape: expected the extents of {expression.ndim} dimensions, got {shape}; give "
            f"the shape that {expression} will have, as in shape=(10,)"
        )
    return _marked(expression, op, shape)


def marks_in(expressions: Iterable[Variable]) -> list[Variable]:
    """Return the marked expressions from which some expressions are computed."""
    variables = inputs_first(expressions)
    return [item for item in variables if item.owner is not None and isinstance(item.owner.op, Mark)]


def check_operation(op: Any, what: str, where: str, dtype: str | None = None) -> None:
    """Raise an error if the values of ranks, of this dtype, cannot be combined with `op`."""
    if not isinstance(op, str) or op not in OPERATIONS:
        error = ValueError if isinstance(op, str) else TypeError
        raise error(f"{what}: {where}: expected one of {', '.join(OPERATIONS)}, got {op!r}")
    if op == "avg" and dtype is not None and not dtype.startswith(("float", "complex")):
        raise TypeError(
            f"{what}: {dtype} cannot be averaged; give another operation, such as 'sum', or cast it "
            f"to a float"
        )


def _marked(expression: Variable, op: str | None, shape: tuple[int, ...]) -> Variable:
    marked = Mark(op, shape)(expression)
    marked.name = expression.name
    return marked
