"""Collectives in graphs."""

from __future__ import annotations

from typing import Any, Literal, Sequence

from synkhronos._checks import check_choice
from synkhronos._typing import ReduceOp, SharedVariable, Variable
from synkhronos.arithmetic.operations import find_operation
from synkhronos.comms.formats import Format, PowerSGD, check_format
from synkhronos.engines.collectives import AllGather, AllReduce, Broadcast, fill_in_buckets
from synkhronos.engines.names import AsTensorError, TensorType, tensor
from synkhronos.world.world import current_world

#: How the losses of the ranks can be combined.
LOSS_OPS = ("avg", "sum")


def all_reduce(x: Variable, op: ReduceOp = "sum", *, loss_op: Literal["avg", "sum"] = "avg") -> Variable:
    r"""Reduce the values of all ranks to one, inside a graph.

    Parameters
    ----------
    x : tensor variable
        It has the same shape on every rank.
    op : {"sum", "avg", "prod", "min", "max"}
        ``"avg"`` is weighted by the numbers of rows on which the ranks compute, as outputs are, and
        needs floats. With ``"sum"``, a sum over rows becomes the sum over all rows; with ``"avg"``, a
        mean over rows becomes the mean over all rows.
    loss_op : {"avg", "sum"}
        How the losses of the ranks, and their gradients, are combined afterwards; see Notes.

    Returns
    -------
    variable
        The reduction, equal to the last bit on all ranks, in the type of `x`.

    Raises
    ------
    TypeError
        If `x` is not a tensor, or the operation is not defined for its dtype.
    ValueError
        If an operation does not exist. In a call, if the shapes of the ranks differ.

    Notes
    -----
    Let rank :math:`r` compute the loss :math:`l_r` on :math:`n_r` rows. With ``loss_op="avg"`` the loss
    that is differentiated is :math:`L = \sum_r n_r l_r / \sum_r n_r`, the average that a function
    returns for an output by default. ``theano.grad`` gives on rank :math:`s`

    .. math:: \sum_r \frac{n_r}{n_s} \frac{\partial l_r}{\partial y_s}

    for the value :math:`y_s` that this rank computes: the gradient of the sum of the ranks' losses, each
    multiplied by its number of rows relative to this rank's. The average of these gradients over the
    ranks, weighted by rows, is the gradient of :math:`L`. That is how outputs are averaged by default,
    and how `synkhronos.extensions.train.make_train_function` averages gradients.

    With ``loss_op="sum"`` the loss is :math:`L = \sum_r l_r`, and the gradient on each rank is the
    gradient of this sum. The ranks' gradients have to be added up: ``(gradient, "sum")``, or
    ``make_train_function(..., loss_op="sum")``. If all ranks have the same number of rows, both give the
    same gradients on each rank.

    The gradient of ``"min"`` and ``"max"`` goes to each rank that has the extreme value, as with
    ``theano.tensor.maximum``. ``"prod"`` has none.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano.tensor as T
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x = T.dvector("x")
    >>> mean = synk.ops.all_reduce(x.mean(), "avg")
    >>> variance = synk.ops.all_reduce(T.sqr(x - mean).mean(), "avg")
    >>> f = synk.function([x], variance)
    >>> f([1.0, 2.0, 6.0])  # two rows on this process, one on the worker
    array(4.66666667)
    >>> f.as_theano([1.0, 2.0, 6.0])
    array(4.66666667)
    >>> synk.close()
    """
    tensor = _tensor(x, "all_reduce")
    operation = find_operation(op, "all_reduce: op")
    operation.check_dtype(tensor.dtype, f"all_reduce of {tensor}")
    reduced: Variable = AllReduce(op, check_choice(loss_op, "all_reduce: loss_op", LOSS_OPS)).of(tensor)
    return reduced


def all_gather(x: Variable, *, loss_op: Literal["avg", "sum"] = "avg") -> Variable:
    """Concatenate the values of all ranks along axis 0, inside a graph.

    Parameters
    ----------
    x : tensor variable
        The shapes of the ranks may differ in axis 0. A number becomes a vector with an item per rank.
    loss_op : {"avg", "sum"}
        How the losses of the ranks are combined, as in `all_reduce`.

    Returns
    -------
    variable
        The rows of all ranks that have rows in the call, in the order of the ranks. The gradient of `x`
        is this rank's rows of the sum of the ranks' gradients.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong. In a call, if the shapes differ in another axis.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano.tensor as T
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x = T.dmatrix("x")
    >>> similarities = x.dot(synk.ops.all_gather(x).T)  # of each row and all rows of the minibatch
    >>> f = synk.function([x], (similarities, "gather"))
    >>> f([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    array([[1., 0., 2.],
           [0., 1., 2.],
           [2., 2., 8.]])
    >>> synk.close()
    """
    tensor = _tensor(x, "all_gather")
    rows = tensor if tensor.ndim else tensor.dimshuffle("x")
    gathered: Variable = AllGather(check_choice(loss_op, "all_gather: loss_op", LOSS_OPS)).of(rows)
    return gathered


def broadcast(x: Variable, *, loss_op: Literal["avg", "sum"] = "avg") -> Variable:
    """Use the master's value on every rank, inside a graph.

    Parameters
    ----------
    x : tensor variable
        The shapes of the ranks may differ.
    loss_op : {"avg", "sum"}
        How the losses of the ranks are combined, as in `all_reduce`.

    Returns
    -------
    variable
        The value that `x` has on the master. The gradient of `x` is the sum of the ranks' gradients on
        the master, and zero on the other ranks.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong. A call raises a ValueError if the master has no rows in it.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano.tensor as T
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x = T.dvector("x")
    >>> f = synk.function([x], (x - synk.ops.broadcast(x[0]), "gather"))
    >>> f([5.0, 6.0, 8.0])  # two rows on this process, one on the worker
    array([0., 1., 3.])
    >>> synk.close()
    """
    operation = Broadcast(check_choice(loss_op, "broadcast: loss_op", LOSS_OPS))
    copy: Variable = operation.of(_tensor(x, "broadcast"))
    return copy


def in_buckets(
    vector: SharedVariable,
    expressions: Sequence[Variable],
    shapes: Sequence[Sequence[int]],
    op: ReduceOp = "avg",
    *,
    wire: Format | None = None,
) -> Variable:
    """Fill a shared vector with arrays, and let it be reduced meanwhile.

    The arrays are computed from the last to the first, as gradients are, and are divided into buckets
    of about 4 MB. On several machines, each bucket is reduced as soon as all ranks have computed it,
    while they compute the next arrays. `synkhronos.all_reduce` of the vector in the same ``fuse`` block
    completes the reduction.

    Parameters
    ----------
    vector : shared vector
        As long as the arrays together.
    expressions : list of variables
        The arrays, in their order in the vector. They have the dtype of the vector.
    shapes : list of tuple of int
        The shapes of the arrays.
    op : {"avg", "sum", "prod", "min", "max"}
        The operation of the `all_reduce`.
    wire : {"float16", "bfloat16", "int8"}, PowerSGD or TopK, optional
        As of the `all_reduce`, but each bucket travels in this form by itself.

    Returns
    -------
    variable
        The new value of the vector, for the updates of a function.

    Raises
    ------
    NotForkedError
        Before ``fork()``.
    TypeError, ValueError
        If an argument is wrong.

    Notes
    -----
    `synkhronos.all_reduce` completes the reduction if its `op` and `wire` are the same, and if `weights`
    is the function for ``"avg"``. Otherwise, and wherever nothing can be reduced ahead, it reduces the
    whole vector: on one machine, on GPUs, in a call with `num_slices`, from the second such function in
    a ``fuse`` block on, in a program, and on machines without a second task each (see ``launch``). The
    vector itself gets this rank's values in the function, and the reduction by `all_reduce`, so other
    calls of the same block must not change it in between.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> import theano.tensor as T
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x = T.dmatrix("x")
    >>> w, b = theano.shared(np.ones(2), "w"), theano.shared(1.0, "b")
    >>> gradients = T.grad(T.sqr(x.dot(w) + b).mean(), [w, b])
    >>> vector = theano.shared(np.zeros(3))
    >>> new = synk.ops.in_buckets(vector, gradients, [(2,), ()])
    >>> f = synk.function([x], updates=[(vector, new, "avg")])
    >>> with synk.fuse():
    ...     _ = f([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    ...     _ = synk.all_reduce(vector, weights=f)
    >>> vector.get_value().round(3)
    array([3.333, 3.333, 4.667])
    >>> synk.close()
    """
    operation = find_operation(op, "in_buckets: op")
    operation.check_dtype(vector.dtype, vector)  # type: ignore[attr-defined]  # of a tensor
    check_format(wire, op)
    if isinstance(wire, PowerSGD) and wire.shapes is not None:
        raise ValueError(
            f"in_buckets: wire: expected PowerSGD({wire.rank}) without shapes, as each bucket has "
            f"the shapes of its arrays, got {wire!r}"
        )
    extents = [tuple(int(extent) for extent in shape) for shape in shapes]
    if len(extents) != len(expressions) or not extents:
        raise ValueError(
            f"in_buckets: shapes: expected one for each of {len(expressions)} expressions, at least "
            f"one, got {len(extents)}"
        )
    is_on_host = isinstance(vector.type, TensorType)
    is_overlapped = is_on_host and current_world().transport.overlap is not None
    filled: Variable = fill_in_buckets(vector, expressions, extents, op, wire, is_overlapped)
    return filled


def _tensor(x: Variable, what: str) -> Any:
    try:
        x = tensor.as_tensor_variable(x)
    except (TypeError, ValueError, AsTensorError) as error:
        raise TypeError(f"{what}: expected a tensor, got {x!r}") from error
    return x
