"""Momentum on top of the parameter updates of any rule."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Callable, Iterable, Mapping, Sequence, Union

import numpy

from synkhronos._text import shortened
from synkhronos.engines import names
from synkhronos.engines.names import SharedVariable, Variable
from synkhronos.extensions._parameters import as_state, checked_parameters, is_state, scalar

Hyper = Union[float, Variable]


def apply_momentum(
    updates: Mapping[SharedVariable, Any] | Sequence[tuple[Any, ...]],
    params: Iterable[SharedVariable] | None = None,
    momentum: Hyper = 0.9,
) -> OrderedDict[SharedVariable, Any] | list[tuple[Any, ...]]:
    r"""Add momentum to the updates of any rule.

    With :math:`\theta'` the new value of a parameter in `updates`:

    .. math:: v \leftarrow \mu v + \theta' - \theta, \qquad \theta \leftarrow \theta + v

    Parameters
    ----------
    updates : list of (shared variable, expression) or ordered dict
        The updates, such as the `param_updates` of a rule. Additional items of longer tuples are kept.
    params : list of shared variables, optional
        The parameters that get momentum; by default all variables in `updates` that are not the state
        of a rule of ``synkhronos.extensions.updates``.
    momentum : float or scalar variable
        :math:`\mu`.

    Returns
    -------
    list or OrderedDict
        The new updates, in the form of `updates`, followed by the updates of the velocities, which have
        the shapes, dtypes and broadcast patterns of their parameters.

    Raises
    ------
    TypeError
        If `updates` is neither pairs nor a mapping, or a parameter is not a shared float tensor.
    ValueError
        If a parameter has no update, or a variable has two.

    Examples
    --------
    >>> import numpy, theano
    >>> from synkhronos.extensions.updates import sgd
    >>> weights = theano.shared(numpy.array([1.0, 2.0]))
    >>> grad_updates, param_updates, grad_shared = sgd(weights.sum(), [weights], 0.25)
    >>> param_updates = apply_momentum(param_updates, momentum=0.5)
    >>> _ = theano.function([], updates=grad_updates)()
    >>> update_params = theano.function([], updates=param_updates)
    >>> _ = update_params(), update_params()
    >>> weights.get_value()
    array([0.375, 1.375])
    """

    def moved(param: Variable, target: Variable, velocity: Variable, decay: Variable) -> Variable:
        return param + velocity

    return _with_velocities(updates, params, momentum, moved)


def apply_nesterov_momentum(
    updates: Mapping[SharedVariable, Any] | Sequence[tuple[Any, ...]],
    params: Iterable[SharedVariable] | None = None,
    momentum: Hyper = 0.9,
) -> OrderedDict[SharedVariable, Any] | list[tuple[Any, ...]]:
    r"""Add Nesterov momentum to the updates of any rule.

    With :math:`\theta'` the new value of a parameter in `updates`:

    .. math:: v \leftarrow \mu v + \theta' - \theta, \qquad \theta \leftarrow \theta' + \mu v

    The parameters, returned values and errors are the same as for :func:`apply_momentum`.

    Examples
    --------
    >>> import numpy, theano
    >>> from synkhronos.extensions.updates import sgd
    >>> weights = theano.shared(numpy.array([1.0, 2.0]))
    >>> grad_updates, param_updates, grad_shared = sgd(weights.sum(), [weights], 0.25)
    >>> param_updates = apply_nesterov_momentum(param_updates, momentum=0.5)
    >>> _ = theano.function([], updates=grad_updates)()
    >>> _ = theano.function([], updates=param_updates)()
    >>> weights.get_value()
    array([0.625, 1.625])
    """

    def moved(param: Variable, target: Variable, velocity: Variable, decay: Variable) -> Variable:
        return target + decay * velocity

    return _with_velocities(updates, params, momentum, moved)


def _with_velocities(
    updates: Mapping[SharedVariable, Any] | Sequence[tuple[Any, ...]],
    params: Iterable[SharedVariable] | None,
    momentum: Hyper,
    moved: Callable[[Variable, Variable, Variable, Variable], Variable],
) -> OrderedDict[SharedVariable, Any] | list[tuple[Any, ...]]:
    entries = _entries_by_variable(updates)
    if params is None:
        params = [variable for variable in entries if not is_state(variable)]
    velocities: OrderedDict[SharedVariable, Variable] = OrderedDict()
    for position, param in enumerate(checked_parameters(params)):
        if param not in entries:
            raise ValueError(
                f"params[{position}] ({param}): expected a variable that updates has an entry for, "
                "got none; leave it out of params"
            )
        target, *rest = entries[param]
        decay = scalar("momentum", momentum, param.dtype)
        zeros = numpy.zeros_like(param.get_value(borrow=True))
        velocity = as_state(
            names.shared(zeros, f"velocity_{param.name or position}", param.broadcastable)
        )
        velocities[velocity] = new_velocity = decay * velocity + (target - param)
        entries[param] = (moved(param, target, new_velocity, decay), *rest)
    if isinstance(updates, Mapping):
        return OrderedDict(
            [*((variable, entry[0]) for variable, entry in entries.items()), *velocities.items()]
        )
    return [*((variable, *entry) for variable, entry in entries.items()), *velocities.items()]


def _entries_by_variable(
    updates: Mapping[SharedVariable, Any] | Sequence[tuple[Any, ...]],
) -> OrderedDict[Variable, tuple[Any, ...]]:
    if isinstance(updates, Mapping):
        updates = list(updates.items())
    entries: OrderedDict[Variable, tuple[Any, ...]] = OrderedDict()
    for position, entry in enumerate(updates):
        if not isinstance(entry, (tuple, list)) or len(entry) < 2:
            raise TypeError(
                f"updates[{position}]: expected (shared variable, expression), got {shortened(entry)}; "
                "pass the param_updates of a rule, the second of the three values that it returns"
            )
        variable, *rest = entry
        if variable in entries:
            raise ValueError(f"updates[{position}]: a second update of {variable}; give one each")
        entries[variable] = tuple(rest)
    return entries
