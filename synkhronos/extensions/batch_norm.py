"""Batch normalization with the mean and the variance of the rows of all ranks.

The graphs consist of Theano's operations and `synkhronos.ops.all_reduce`. In a plain ``theano.function``
they compute the same result on all rows.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Sequence, Union

import synkhronos as synk
from synkhronos.engines.names import Variable, inv
from synkhronos.engines.names import tensor as tt

Axes = Union[Literal["per-activation", "spatial"], Sequence[int]]


class Moments(NamedTuple):
    """The mean and the variance of the rows of all ranks.

    Attributes
    ----------
    mean, variance : variable
        They have the dtype of the input and the remaining axes. The variance is the mean of the squared
        distances from the mean.
    count : variable
        The number of values, over all ranks, in each mean; an int64 scalar.
    """

    mean: Variable
    variance: Variable
    count: Variable


def moments(
    inputs: Any, axes: Axes = "per-activation", *, loss_op: Literal["avg", "sum"] = "avg"
) -> Moments:
    """Return the mean and the variance of the rows of all ranks.

    Ranks with more rows have a greater weight.

    Parameters
    ----------
    inputs : float tensor variable
        Axis 0 has the rows of the function's inputs. The extents of the other axes are the same on every
        rank.
    axes : "per-activation", "spatial", or tuple of int
        The axes over which the mean is taken, axis 0 among them: ``(0,)``, or all but axis 1.
    loss_op : {"avg", "sum"}
        How the losses of the ranks are combined; see `synkhronos.ops.all_reduce`.

    Returns
    -------
    Moments

    Raises
    ------
    TypeError, ValueError
        If `inputs` is not a float tensor, or axis 0 is not among the axes.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano.tensor as T
    >>> from synkhronos.extensions import batch_norm
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x = T.dmatrix("x")
    >>> mean, variance, _ = batch_norm.moments(x)
    >>> f = synk.function([x], [mean, variance])
    >>> f([[1.0, 0.0], [2.0, 0.0], [6.0, 9.0]])  # two rows on this process, one on the worker
    [array([3., 3.]), array([ 4.66666667, 18.        ])]
    >>> synk.close()
    """
    inputs = tt.as_tensor_variable(inputs)
    if not inputs.dtype.startswith("float"):
        raise TypeError(f"batch_norm: expected a float tensor, got {inputs} of {inputs.dtype}")
    axes = _axes_of(axes, inputs.ndim)

    def averaged(value: Variable) -> Variable:
        return synk.ops.all_reduce(value, "avg", loss_op=loss_op)

    mean = averaged(inputs.mean(axes))
    variance = averaged(tt.sqr(inputs - mean.dimshuffle(_pattern(axes, inputs.ndim))).mean(axes))
    # Extents are reduced as well, since values that only depend on collectives are equal on every rank.
    numbers = inputs.shape[0]
    for axis in axes[1:]:
        numbers = numbers * inputs.shape[axis]
    return Moments(mean, variance, synk.ops.all_reduce(numbers, loss_op=loss_op))


def batch_normalization_train(
    inputs: Any,
    gamma: Any,
    beta: Any,
    axes: Axes = "per-activation",
    epsilon: float = 1e-4,
    running_average_factor: float = 0.1,
    running_mean: Any = None,
    running_var: Any = None,
    *,
    loss_op: Literal["avg", "sum"] = "avg",
) -> tuple[Variable, ...]:
    """Normalize inputs by the mean and the variance of the rows of all ranks.

    It has the same arguments and return values as ``theano.tensor.nnet.bn.batch_normalization_train``.
    For evaluation, use Theano's ``batch_normalization_test`` with the running averages.

    Parameters
    ----------
    inputs, axes, loss_op
        As in `moments`.
    gamma, beta : tensors
        Scale and shift, with the axes that are not in `axes`.
    epsilon : float
        Added to the variance.
    running_average_factor : float
        The weight of the newest minibatch in the running averages.
    running_mean, running_var : tensors, optional
        The current running averages; give both or neither.

    Returns
    -------
    out : variable
        ``(inputs - mean) * invstd * gamma + beta``.
    mean, invstd : variables
        The mean, and 1 over the square root of the variance plus `epsilon`.
    new_running_mean, new_running_var : variables
        If running averages were given: their new values, for `updates`. They are the same on every rank.
        The average of the variance is unbiased: the variance is multiplied by ``m / (m - 1)`` for m
        values over all ranks. A single value leaves it as it is, where Theano's function gives NaN.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> import theano.tensor as T
    >>> from synkhronos.extensions import batch_norm
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x, average, variance = T.dmatrix("x"), theano.shared(np.zeros(1)), theano.shared(np.ones(1))
    >>> out, _, _, *new = batch_norm.batch_normalization_train(
    ...     x, np.ones(1), np.zeros(1), running_mean=average, running_var=variance)
    >>> f = synk.function([x], (out, "gather"), updates=list(zip([average, variance], new)))
    >>> f([[1.0], [2.0], [6.0]]).round(2)  # two rows on this process, one on the worker
    array([[-0.93],
           [-0.46],
           [ 1.39]])
    >>> synk.gather([average, variance])
    [array([[0.3],
           [0.3]]), array([[1.6],
           [1.6]])]
    >>> synk.close()
    """
    inputs, gamma, beta = map(tt.as_tensor_variable, (inputs, gamma, beta))
    axes = _axes_of(axes, inputs.ndim)
    if (running_mean is None) != (running_var is None):
        raise ValueError("batch_norm: expected both running_mean and running_var, or none of them")
    averages = [] if running_mean is None else [running_mean, running_var]
    averages = [tt.as_tensor_variable(average) for average in averages]
    names = ("gamma", "beta", "running_mean", "running_var")
    for name, average in zip(names, (gamma, beta, *averages)):
        if average.ndim != inputs.ndim - len(axes):
            raise ValueError(
                f"batch_norm: {name}: expected {inputs.ndim - len(axes)} dimensions, one for each axis "
                f"of the input except {axes}, got {average.ndim}"
            )
    mean, variance, count = moments(inputs, axes, loss_op=loss_op)
    invstd = inv(tt.sqrt(variance + tt.cast(epsilon, inputs.dtype)))
    pattern = _pattern(axes, inputs.ndim)
    scale, shift, centre = ((item.dimshuffle(pattern)) for item in (invstd * gamma, beta, mean))
    out = (inputs - centre) * scale + shift
    unbiased = variance * tt.cast(count / tt.maximum(count - 1, 1), inputs.dtype)
    factor = tt.cast(running_average_factor, inputs.dtype)
    # A single value has no variance.
    factors = [factor, tt.switch(tt.gt(count, 1), factor, tt.zeros_like(factor))]
    news = [
        old.type.filter_variable(tt.cast(old * (1 - weight) + weight * new, old.dtype))
        for old, new, weight in zip(averages, (mean, unbiased), factors)
    ]
    return (out, mean, invstd, *news)


def _axes_of(axes: Axes, ndim: int) -> tuple[int, ...]:
    """Return the axes in ascending order."""
    if isinstance(axes, str):
        if axes not in ("per-activation", "spatial"):
            raise ValueError(
                f"batch_norm: axes: expected 'per-activation', 'spatial' or numbers, got {axes!r}"
            )
        return (0,) if axes == "per-activation" else (0, *range(2, ndim))
    chosen = tuple(sorted(int(axis) for axis in axes))
    if chosen[:1] != (0,) or len(set(chosen)) < len(chosen) or chosen[-1] >= ndim:
        raise ValueError(
            f"batch_norm: axes: expected distinct axes below {ndim}, and among them 0, whose rows the "
            f"ranks share, got {axes!r}"
        )
    return chosen


def _pattern(axes: Sequence[int], ndim: int) -> list[int | str]:
    """Return the pattern that broadcasts the remaining axes to all axes."""
    kept = iter(range(ndim - len(axes)))
    return ["x" if axis in axes else next(kept) for axis in range(ndim)]
