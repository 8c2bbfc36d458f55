"""Parameters, losses and gradients, which are checked; hyperparameters; and the gradient as one vector.

The optimizer state is in flat vectors, too, so that a rule consists of a few operations on long vectors
and one subtraction per parameter. Compared with state in the shape of each parameter, measured with
Theano on one core (float32, 161 tensors with 25.6 M numbers in total): momentum takes 14 instead of
21 ms, adam 31 instead of 64 ms, adadelta 40 instead of 81 ms. With 8 tensors and 0.43 M numbers, adam
takes 0.2 instead of 0.9 ms, and momentum the same time.

PyTensor's types have the lengths of the vectors and the shapes of the parameters, without which its C
code has loops with strides. With 6 tensors and 0.67 M numbers in total, Nesterov momentum takes 0.5
instead of 1.4 ms, adagrad 0.5 instead of 1.1, adam 1.3 instead of 2.1.
"""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any, Callable, Iterable, Iterator, List, Sequence, Tuple

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
        gradients = _checked_gradients(list(map(names.dense, loss)), params)
    else:
        gradients = list(map(names.dense, _computed_gradients(loss, params)))
    return [
        gradient if gradient.dtype == param.dtype else tt.cast(gradient, param.dtype)
        for param, gradient in zip(params, gradients)
    ]


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
    value = checked_scalar(name, value)
    # A float64 scalar would have float32 parameters in float64.
    if isinstance(value, Variable):
        return tt.cast(value, dtype)
    number = value.astype(dtype)
    if value and not number:
        least = float(numpy.finfo(dtype).smallest_subnormal)
        raise ValueError(f"{name}: {value} is 0 in {dtype}; give a number of at least {least:.1g}")
    return tt.constant(number)


def checked_scalar(name: str, value: Any) -> Variable | numpy.ndarray:
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


UpdatePairs = List[Tuple[SharedVariable, Variable]]
#: The updates of the gradient vector, and of the parameters and the state; and this vector
Rule = Tuple[UpdatePairs, UpdatePairs, SharedVariable]


class Layout:
    """Arrays of fixed shapes, flattened and joined in their order.

    Parameters
    ----------
    shapes : list of tuple of int
        The shape of each array.
    broadcastable : list of tuple of bool
        The broadcast pattern of each array.

    Attributes
    ----------
    size : int
        The length of the vector.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], broadcastable: Sequence[tuple[bool, ...]]
    ) -> None:
        self._shapes, self._broadcastable = shapes, broadcastable
        sizes = [int(numpy.prod(shape, dtype=numpy.int64)) for shape in shapes]
        self._ends = [int(end) for end in numpy.cumsum(sizes)]
        self.size = self._ends[-1]

    def new_vector(self, dtype: str, name: str) -> SharedVariable:
        """Return a shared vector of zeros for the arrays. It knows their shapes."""
        vector = names.shared(numpy.zeros(self.size, dtype), name, (False,))
        vector.tag.pieces = tuple(tuple(map(int, shape)) for shape in self._shapes)
        return vector

    def pieces(self, vector: Variable) -> Iterator[Variable]:
        """Yield each array's part of `vector`, in the array's shape."""
        start = 0
        for shape, broadcastable, end in zip(self._shapes, self._broadcastable, self._ends):
            piece = tt.reshape(vector[start:end], shape, ndim=len(shape))
            yield names.with_pattern(piece, broadcastable)
            start = end

    def filled(self, vector: Variable, expressions: Sequence[Variable]) -> Variable:
        """Return `vector` with the values of `expressions` in it, written in place."""
        start, expressions = 0, list(expressions)
        for expression, end in zip(expressions, self._ends):
            # A concatenation would create a new array each time, which would have to be copied to
            # shared memory.
            vector = tt.set_subtensor(vector[start:end], expression.flatten())
            start = end
        vector.tag.filled_with = expressions
        return vector


def common_dtype(params: Sequence[SharedVariable]) -> str:
    """Return the common dtype of all `params`, or raise an error."""
    dtype = params[0].dtype
    for position, param in enumerate(params):
        if param.dtype != dtype:
            raise TypeError(
                f"params: expected one dtype for the flat gradient vector, got {dtype} for "
                f"{described(params[0], 0)} and {param.dtype} for {described(param, position)}; "
                "convert the parameters to one dtype, or use sgd_nonflat"
            )
    return dtype


class FlatGradient(Layout):
    """The gradient vector of a list of parameters, and state vectors of the same length.

    Parameters
    ----------
    loss : scalar expression, or list of gradient expressions
        The loss, or its gradients by the parameters.
    params : list of float shared variables, all of one dtype
        The parameters.

    Attributes
    ----------
    params : list of shared variables
        The parameters.
    dtype : str
        The dtype of the parameters and vectors.
    vector : shared vector
        The flattened gradients of all parameters, in the order of `params`; initially zero. Its type has
        no length: PyTensor would put a new array in its place if a single gradient fills it.
    gradient : vector
        The same, with its length in its type.
    """

    def __init__(self, loss: Any, params: Iterable[SharedVariable]) -> None:
        self.params = checked_parameters(params)
        self.dtype = common_dtype(self.params)
        self._expressions = gradients_of(loss, self.params)
        shapes = [param.get_value(borrow=True).shape for param in self.params]
        super().__init__(shapes, [param.broadcastable for param in self.params])
        self.vector = self.new_vector(self.dtype, "flat_gradient")
        self.gradient = names.fixed(self.vector, (self.size,))
        self._state_updates: UpdatePairs = []

    def scalars(self, **values: Any) -> list[Variable]:
        """Return hyperparameters as scalars of the vector's dtype."""
        return [scalar(name, value, self.dtype) for name, value in values.items()]

    def state(self, name: str) -> SharedVariable:
        """Return a new state vector of zeros, as long as the gradient vector."""
        return as_state(names.shared_vector(numpy.zeros(self.size, self.dtype), f"flat_{name}"))

    def update(self, state: SharedVariable, new: Variable) -> Variable:
        """Return the new value of a state, which the rule updates."""
        self._state_updates.append((state, new))
        return new

    def step_count(self) -> Variable:
        """Return a new scalar that is 1 in the first step."""
        dtype = numpy.promote_types(self.dtype, "float32")  # float16 does not count beyond 2048
        count = as_state(names.shared(numpy.zeros((), dtype), "step_count", ()))
        return self.update(count, count + 1)

    def gradient_updates(self) -> UpdatePairs:
        """Return the update that writes the gradients into the vector, in place."""
        return [(self.vector, self.filled(self.vector, self._expressions))]

    def descent(self, step: Variable, rate: Variable | None = None) -> Rule:
        """Return the rule that subtracts the vector `step` from the parameters, or `rate` times it."""
        return self._rule(lambda old, piece: old - (piece if rate is None else rate * piece), step)

    def ascent(self, step: Variable) -> Rule:
        """Return the rule that adds the vector `step` to the parameters."""
        return self._rule(operator.add, step)

    def _rule(self, moved: Callable[[Variable, Variable], Variable], step: Variable) -> Rule:
        """Return the three values of a rule that moves each parameter by its part of `step`."""
        fixed = [names.fixed(param, param.get_value(borrow=True).shape) for param in self.params]
        param_updates = list(zip(self.params, map(moved, fixed, self.pieces(step))))
        return self.gradient_updates(), [*param_updates, *self._state_updates], self.vector
