"""A training step on all ranks that equals the serial step on the whole minibatch.

Each rank computes the gradient on its rows. The gradients are averaged, weighted by the numbers of rows,
and each rank applies the same update to its parameters. The step is a single command: the ranks
synchronize at one start and one finish barrier, and in the all-reduce.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence, Tuple, Union

import numpy
import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof import Variable

import synkhronos as synk
from synkhronos.extensions._flat_gradient import UpdatePairs

Variables = Union[Variable, Sequence[Variable]]
UpdateRule = Callable[..., Tuple[UpdatePairs, UpdatePairs, Any]]


def make_train_function(
    loss: Variable,
    params: Sequence[SharedVariable],
    x: Variables,
    y: Variables,
    update_rule: UpdateRule,
    *args: Any,
    **kwargs: Any,
) -> Callable[..., numpy.ndarray]:
    """Build a function that trains on one minibatch, on all ranks.

    Parameters
    ----------
    loss : scalar variable
        The loss, a mean over the rows of the minibatch.
    params : list of shared variables
        The parameters. If they are identical on every rank, they remain identical.
    x, y : variable, or list of these
        The inputs of `loss`, each split over the ranks along axis 0.
    update_rule : callable
        A rule of `synkhronos.extensions.updates`, or a function with the same interface: called as
        ``update_rule(loss, params, *args, **kwargs)``, it returns
        ``(grad_updates, param_updates, grad_shared)``.
    *args, **kwargs
        Passed to the update rule.

    Returns
    -------
    train_minibatch : callable
        ``train_minibatch(x_data, y_data, batch=None, num_slices=1)`` takes a step on the rows `batch`
        and returns the loss before the step, as a 0-d array of the dtype of `loss`. With `num_slices`
        each rank computes its gradient in slices; the step is the same, and takes less memory. The
        arguments and errors are those of a call of a `Function`.

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used.
    TypeError, ValueError
        If `function` or the update rule does not accept an argument.

    Examples
    --------
    >>> train_minibatch = make_train_function(                             # doctest: +SKIP
    ...     loss, params, x, y, updates.nesterov_momentum, learning_rate=0.01)
    >>> synk.distribute()                                                  # doctest: +SKIP
    >>> train_minibatch(x_data, y_data, batch=slice(0, 500))               # doctest: +SKIP
    """
    grad_updates, param_updates, grad_shared = update_rule(loss, params, *args, **kwargs)
    gradient = synk.function(_inputs(x, y), loss, updates=grad_updates, name="gradient")
    update = synk.function([], updates=param_updates, name="update")

    def train_minibatch(
        x_data: Any, y_data: Any, batch: Any = None, num_slices: int = 1
    ) -> numpy.ndarray:
        data = [*_as_list(x_data), *_as_list(y_data)]
        with synk.fuse():
            value = gradient(*data, batch=batch, num_slices=num_slices)
            synk.all_reduce(grad_shared, weights=gradient)
            update()
        return value.result()

    return train_minibatch


def make_train_function_theano(
    loss: Variable,
    params: Sequence[SharedVariable],
    x: Variables,
    y: Variables,
    update_rule: UpdateRule,
    *args: Any,
    **kwargs: Any,
) -> Callable[..., numpy.ndarray]:
    """Build the same step as `make_train_function` with plain Theano, for this process only.

    The parameters are the same as for `make_train_function`.

    Returns
    -------
    train_minibatch : callable
        ``train_minibatch(x_data, y_data, batch=None)``, where the data are NumPy arrays.
    """
    grad_updates, param_updates, _ = update_rule(loss, params, *args, **kwargs)
    inputs = _inputs(x, y)
    gradient = theano.function(inputs, loss, updates=grad_updates, name="gradient")
    update = theano.function([], updates=param_updates, name="update")

    def train_minibatch(x_data: Any, y_data: Any, batch: Any = None) -> numpy.ndarray:
        if batch is None or isinstance(batch, (int, numpy.integer)):
            rows = slice(batch)
        else:
            rows = batch if isinstance(batch, slice) else numpy.asarray(batch)
        value = gradient(*(data[rows] for data in [*_as_list(x_data), *_as_list(y_data)]))
        update()
        return value

    return train_minibatch


def _inputs(x: Variables, y: Variables) -> list[Variable]:
    return [*_as_list(x), *_as_list(y)]


def _as_list(one_or_many: Any) -> list:
    return list(one_or_many) if isinstance(one_or_many, (list, tuple)) else [one_or_many]
