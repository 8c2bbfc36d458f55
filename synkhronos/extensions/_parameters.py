"""Checks of parameters, losses and gradients, and hyperparameters as scalars of a dtype."""

from __future__ import annotations

from numbers import Real
from typing import Any, Callable, Iterable, Sequence

import numpy

from synkhronos._text import listed, shortened
from synkhronos.engines import names
from synkhronos.engines.names import SharedVariable, Variable
from synkhronos.engines.names import tensor as tt

FLOAT_DTYPES = ("float16", "float32", "float64")

_LOWER = (
    "give rewrite_graph(loss.values, include=('lower_xtensor',)), of pytensor.graph.rewriting.utils, "
    "and shared tensors as params, used by as_xtensor(param, dims)"
)


def described(variable: Any, position: int) -> str:
    """Return how error messages refer to an entry of a list of parameters."""
    name = getattr(variable, "name", None)
    return f"params[{position}]" if name is None else f"params[{position}] ({name})"


def checked_parameters(params: Iterable[SharedVariable]) -> list[SharedVariable]:
    """Return `params` as a list of distinct float shared tensors, or raise an error."""
    if isinstance(params, Variable) or not isinstance(params, Iterable):
        raise TypeError(
            f"params: expected a list of shared variables, got {type(params).__name__}; "
            "put a single parameter in a list: [parameter]"
        )
    params = list(params)
    if not params:
        raise ValueError("params: expected at least one shared variable, got an empty list")
    first_position: dict[SharedVariable, int] = {}
    for position, param in enumerate(params):
        which = described(param, position)
        if not isinstance(param, SharedVariable) or not _is_tensor(param):
            raise TypeError(
                f"{which}: expected a shared tensor variable, got {type(param).__name__} "
                f"{shortened(param)}; create it with {names.package.__name__}.shared(array)"
            )
        if param.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"{which}: expected one of the dtypes {', '.join(FLOAT_DTYPES)}, got {param.dtype}; "
                f"store the parameter as array.astype({names.package.__name__}.config.floatX)"
            )
        if param in first_position:
            raise ValueError(
                f"{which}: the same shared variable as params[{first_position[param]}]; "
                "list every parameter once"
            )
        first_position[param] = position
    return params


def gradients_of(loss: Any, params: Sequence[SharedVariable]) -> list[Variable]:
    """Return one gradient per parameter, in the parameter's dtype.

    `loss` is a scalar expression, or a list of gradient expressions in the order of `params`.
    """
    if isinstance(loss, (list, tuple)):
        gradients = _checked_gradients(list(map(_as_dense, loss)), params)
    else:
        gradients = list(map(_as_dense, _computed_gradients(loss, params)))
    return [
        gradient if gradient.dtype == param.dtype else tt.cast(gradient, param.dtype)
        for param, gradient in zip(params, gradients)
    ]


def _as_dense(gradient: Any) -> Any:
    return names.dense(gradient) if isinstance(gradient, Variable) else gradient


def _checked_gradients(gradients: Sequence[Any], params: Sequence[SharedVariable]) -> list[Variable]:
    if len(gradients) != len(params):
        raise ValueError(
            f"loss: expected one gradient per parameter, got {len(gradients)} gradients for "
            f"{len(params)} parameters"
        )
    for position, (gradient, param) in enumerate(zip(gradients, params)):
        if not isinstance(gradient, Variable) or not _is_tensor(gradient):
            raise TypeError(
                f"loss[{position}]: expected a gradient expression (a tensor variable), got "
                f"{type(gradient).__name__}; pass {names.package.__name__}.grad(loss, params), or the "
                f"loss itself"
            )
        if gradient.ndim != param.ndim:
            raise ValueError(
                f"loss[{position}]: expected a gradient with the {param.ndim} dimensions of "
                f"{described(param, position)}, got {gradient.ndim}; give the gradients in the "
                "order of params"
            )
    return list(gradients)


def check_loss(loss: Any) -> None:
    """Raise an error unless `loss` is a scalar float expression."""
    if isinstance(loss, Variable) and _has_dims(loss):
        raise TypeError(f"loss: expected a scalar tensor, got an xtensor; {_LOWER}")
    if not isinstance(loss, Variable) or not _is_tensor(loss):
        raise TypeError(
            f"loss: expected a scalar expression or a list of gradients, got {type(loss).__name__}"
        )
    if loss.ndim != 0:
        raise ValueError(
            f"loss: expected a scalar expression, got {loss.ndim} dimension(s); "
            "reduce it first, as in loss.mean()"
        )
    if loss.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"loss: expected a float expression, got {loss.dtype}, which has no gradient; "
            "compute it from float variables"
        )


def _computed_gradients(loss: Any, params: Sequence[SharedVariable]) -> list[Variable]:
    check_loss(loss)
    try:
        gradients = names.gradients(loss, list(params))
    except NotImplementedError as error:
        if any(_has_dims(variable) for variable in names.ancestors([loss])):
            raise TypeError(f"loss: an operation of xtensor has no gradient; {_LOWER}") from error
        raise
    disconnected = [
        described(param, position)
        for position, (param, gradient) in enumerate(zip(params, gradients))
        if gradient is None
    ]
    if disconnected:
        raise ValueError(
            "params: expected parameters that the loss depends on, got some that it does not: "
            f"{listed(disconnected)}; leave them out of params"
        )
    return gradients


def _has_dims(variable: Variable) -> bool:
    """Whether the dimensions of a variable have names, as of PyTensor's ``xtensor``."""
    return hasattr(variable.type, "dims")


def _is_tensor(variable: Variable) -> bool:
    return hasattr(variable.type, "broadcastable") and not _has_dims(variable)


def scalar(name: str, value: Any, dtype: str) -> Variable:
    """Return the hyperparameter `value`, a number or a scalar variable, as a scalar of `dtype`."""
    value = _checked_scalar(name, value)
    # A float64 scalar would have float32 parameters in float64.
    if isinstance(value, Variable):
        return tt.cast(value, dtype)
    number = value.astype(dtype)
    if value and not number:
        least = float(numpy.finfo(dtype).smallest_subnormal)
        raise ValueError(f"{name}: {value} is 0 in {dtype}; give a number of at least {least:.1g}")
    return tt.constant(number)


def in_double_precision(formula: Callable[..., Any], dtype: str, /, **values: Any) -> Variable:
    """Return a formula of scalars, computed in double precision, as a scalar of `dtype`.

    The steps of the computation are no tensors: with the flag ``warn_float64`` compilers refuse tensors
    of float64.

    Parameters
    ----------
    formula : function
    dtype : str
    **values : numbers or scalar variables
        The arguments of the formula, by its names for them.
    """
    checked = {name: _checked_scalar(name, value) for name, value in values.items()}
    variables = {name: variable for name, variable in checked.items() if isinstance(variable, Variable)}
    numbers = {name: numpy.float64(item) for name, item in checked.items() if name not in variables}
    if not variables:
        return tt.constant(numpy.asarray(formula(**numbers), dtype))
    kind = names.scalar.get_scalar_type
    inputs = {name: kind(variable.dtype)() for name, variable in variables.items()}
    with names.without_test_values():
        doubles = {name: names.scalar.cast(variable, "float64") for name, variable in inputs.items()}
        for name, number in numbers.items():  # of which a constant() would have the dtype floatX
            doubles[name] = names.scalar.ScalarConstant(kind("float64"), number)
        result = names.scalar.cast(formula(**doubles), dtype)
    return names.Elemwise(names.scalar.Composite([*inputs.values()], [result]))(*variables.values())


def _checked_scalar(name: str, value: Any) -> Variable | numpy.ndarray:
    """Return a hyperparameter, which is a scalar variable, or a number as an array."""
    if isinstance(value, Variable) and hasattr(value.type, "broadcastable"):
        ndim = value.ndim
    elif isinstance(value, (Real, numpy.ndarray)):
        value = numpy.asarray(value)
        ndim = value.ndim
    else:
        raise TypeError(f"{name}: expected a number or a scalar variable, got {type(value).__name__}")
    if ndim != 0:
        raise ValueError(
            f"{name}: expected a scalar, got {ndim} dimension(s); one value applies to all parameters"
        )
    return value


def as_state(variable: SharedVariable) -> SharedVariable:
    """Return a shared variable, marked as optimizer state, which `is_state` recognizes."""
    variable.tag.optimiser_state = True
    return variable


def is_state(variable: Variable) -> bool:
    """Whether `variable` is optimizer state."""
    return getattr(variable.tag, "optimiser_state", False)
