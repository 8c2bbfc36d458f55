r"""``theanompi.lib.opt``: updates of the parameters, and the functions of a model's iterations.

A model has ``params``, ``grads`` and ``weight_types`` (``"W"`` or ``"b"`` for each parameter), the
variables ``x``, ``y``, ``lr`` and ``subb_ind`` with ``shared_x_slice``, ``shared_y_slice`` and
``shared_lr`` in their place, the outputs ``cost`` and ``error``, the momentum ``mu``, the weight decay
``eta``, and the methods ``compile_train`` and ``compile_val``.

With the gradient :math:`g`, the learning rate :math:`\lambda` and the momentum :math:`\mu`, a velocity
becomes :math:`\mu v - \lambda g`, or :math:`\mu^2 v - (1 + \mu) \lambda g` with Nesterov's momentum.
Weights decay; biases do not, and have twice the rate.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import theano
import theano.tensor as tt

from synkhronos._checks import check_choice

Variable = Any  # of Theano, which has no types
Updates = list  # of (shared variable, new value)

_SYNC_TYPES = ("avg", "cdd")
_SCALE = 10.0  # gradients are clipped to this, if they are


def pre_model_iter_fn(model: Any, sync_type: str, f_train: bool = True, f_val: bool = True) -> None:
    """Let a model compile the functions of its iterations, and keep them.

    For training, the model gets ``vels`` and ``vels2``, shared variables like its parameters, and
    ``train_iter_fn(subb_ind)``, which returns the cost and the error. With ``"avg"`` this function, also
    ``train_fn``, updates the parameters. With ``"cdd"`` it first calls ``descent_vel()``, which adds
    ``vels2`` to the parameters, and then ``get_vel(subb_ind)``, which computes ``vels``. For validation
    the model gets ``val_iter_fn``.

    Parameters
    ----------
    model : object
        The model.
    sync_type : {"avg", "cdd"}
        What the ranks exchange: parameters, or velocities.
    f_train, f_val : bool
        Whether to compile for training, and for validation.

    Raises
    ------
    ValueError
        If `sync_type` is another one.
    """
    if f_train:
        model.vels, model.vels2 = _zeros(model.params), _zeros(model.params)
        first, *others = prepare_update_dict(model, sync_type)
        values = (model.shared_x_slice, model.shared_y_slice, model.shared_lr)
        pairs = zip((model.x, model.y, model.lr), map(tt.as_tensor_variable, values))
        train = {
            "inputs": [model.subb_ind],
            "outputs": [model.cost, model.error],
            "updates": list(fix_update_bcasts(dict(first)).items()),
            "givens": [(variable, _as(variable, value)) for variable, value in pairs],
        }
        descend = [{"inputs": [], "outputs": [], "updates": other} for other in others]
        model.compile_train(train, *descend)
        compiled = model.compiled_train_fn_list
        if sync_type == "cdd":
            model.get_vel, model.descent_vel = compiled
        else:
            (model.train_fn,) = compiled
        model.train_iter_fn = choose_iter_fn(model, sync_type)
    if f_val:
        model.compile_val()
        model.val_iter_fn = model.val_fn


def choose_iter_fn(model: Any, sync_type: str) -> Callable[[Any], Any]:
    """Return the function of one iteration; see `pre_model_iter_fn`."""
    if check_choice(sync_type, "sync_type", _SYNC_TYPES) == "avg":
        return model.train_fn

    def descend_and_compute(subb_ind: Any) -> Any:
        model.descent_vel()
        return model.get_vel(subb_ind)

    return descend_and_compute


def prepare_update_dict(model: Any, sync_type: str, clip: bool = False) -> list[Updates]:
    """Return the updates of a model: with ``"cdd"`` those of velocities and those of parameters.

    Parameters
    ----------
    model : object
        The model. ``use_momentum`` and ``use_nesterov_momentum`` choose the rule.
    sync_type : {"avg", "cdd"}
        What the ranks exchange.
    clip : bool
        Whether to clip the gradients, to 10.
    """
    nesterov = model.use_nesterov_momentum if model.use_momentum else None
    found = _for_bsp(model, _velocities(model, nesterov, clip), sync_type, model.use_momentum)
    return [*found[1:]] if sync_type == "cdd" else [found[0]]


def BSP_MSGD(  # noqa: N802  # Theano-MPI's name
    model: Any, use_nesterov_momentum: bool, sync_type: str, clip: bool
) -> tuple[Updates, Updates, Updates]:
    """Return the updates with momentum for BSP.

    The three lists are those for ``"avg"``, and, for ``"cdd"``, of the velocities and of the parameters.
    Those for the other `sync_type` are empty.
    """
    return _for_bsp(model, _velocities(model, use_nesterov_momentum, clip), sync_type, keeps=True)


def BSP_SGD(model: Any, sync_type: str, clip: bool) -> tuple[Updates, Updates, Updates]:  # noqa: N802
    """Return the updates without momentum for BSP, in lists as those of `BSP_MSGD`."""
    return _for_bsp(model, _velocities(model, None, clip), sync_type, keeps=False)


def MSGD(model: Any, use_nesterov_momentum: bool, sync_type: str, clip: bool) -> Updates:  # noqa: N802
    """Return the updates with momentum, which also add up all changes in ``model.vels2``."""
    new = _velocities(model, use_nesterov_momentum, clip)
    updates = _for_bsp(model, new, "avg", keeps=True)[0]
    return updates + [(total, _as(total, total + v)) for total, v in zip(model.vels2, new)]


def SGD(model: Any, sync_type: str, clip: bool) -> Updates:  # noqa: N802
    """Return the updates without momentum, which also leave the change in ``model.vels2``."""
    new = _velocities(model, None, clip)
    updates = _for_bsp(model, new, "avg", keeps=False)[0]
    return updates + [(change, _as(change, v)) for change, v in zip(model.vels2, new)]


def fix_update_bcasts(updates: dict[Any, Any]) -> dict[Any, Any]:
    """Return updates whose new values are broadcast on the same axes as the variables."""
    return {
        shared: new
        if new.broadcastable == shared.broadcastable
        else tt.patternbroadcast(new, shared.broadcastable)
        for shared, new in updates.items()
    }


def _velocities(model: Any, nesterov: bool | None, clip: bool) -> list[Variable]:
    """Return the new velocity of each parameter; `nesterov` is None without momentum."""
    if len(model.weight_types) != len(model.params):
        raise ValueError(
            f"expected a weight type for each of {len(model.params)} parameters, got "
            f"{len(model.weight_types)}"
        )
    found = []
    rows = zip(model.params, model.grads, model.weight_types, model.vels)
    for param, gradient, kind, velocity in rows:
        if kind not in ("W", "b"):
            raise TypeError(f"weight_types: expected 'W' or 'b' for each parameter, got {kind!r}")
        if clip:
            gradient = tt.clip(gradient, -_SCALE, _SCALE)
        rate = model.lr if kind == "W" else 2 * model.lr
        change = -rate * (gradient + model.eta * param if kind == "W" else gradient)
        if nesterov is None:
            found.append(change)
        elif nesterov:
            found.append(model.mu**2 * velocity + (1 + model.mu) * change)
        else:
            found.append(model.mu * velocity + change)
    return found


def _for_bsp(
    model: Any, new: Sequence[Variable], sync_type: str, keeps: bool
) -> tuple[Updates, Updates, Updates]:
    """Return the three lists of `BSP_MSGD`; `keeps` says whether ``"avg"`` updates velocities, too."""
    velocities = [(shared, _as(shared, value)) for shared, value in zip(model.vels, new)]
    if check_choice(sync_type, "sync_type", _SYNC_TYPES) == "cdd":
        totals = zip(model.params, model.vels2)
        return [], velocities, [(param, _as(param, param + total)) for param, total in totals]
    step = [(param, _as(param, param + value)) for param, value in zip(model.params, new)]
    return [*(velocities if keeps else []), *step], [], []


def _zeros(params: Sequence[Any]) -> list[Any]:
    return [theano.shared(0 * param.get_value(), broadcastable=param.broadcastable) for param in params]


def _as(variable: Any, value: Variable) -> Variable:
    """Return a new value of a variable, or what takes its place, in its dtype: a rate may be wider."""
    return value if value.dtype == variable.dtype else tt.cast(value, variable.dtype)
