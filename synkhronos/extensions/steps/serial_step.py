"""The serial step, and a step whose random numbers are replaced by numbers that follow from the rows.

The ranks draw other numbers than one process would, so a step that draws cannot be compared with the
serial step. With these numbers it can: a row gets the same numbers on any rank.
"""

from __future__ import annotations

from typing import Any, Callable, NoReturn, Sequence

import numpy

from synkhronos.engines import names
from synkhronos.engines.analysis.graphs import Dependence, draws_in, inputs_first, operands_with
from synkhronos.engines.names import Variable, package
from synkhronos.engines.names import tensor as tt
from synkhronos.extensions.steps.arguments import MISSING
from synkhronos.extensions.steps.definition import Definition


class SerialStep:
    """The serial step that a step on all ranks must equal. It is called like a `Step`."""

    def __init__(self, definition: Definition) -> None:
        inputs, options = definition.inputs, definition.options
        self._inputs = inputs
        self.name: str | None = options.get("name")
        self._scattered = [variable in definition.rows for variable in inputs.variables]
        self._function = package.function(
            inputs.given,
            [spec.variable for spec in definition.outputs],
            updates=[(update.target, update.new) for update in definition.merged().updates],
            givens=list(definition.givens.items()),
            **{"name": "gradient", **options},
        )

    def check(self, *_: Any) -> NoReturn:
        """Refuse to compare the serial step with itself."""
        raise TypeError(
            "check: expected a step on all ranks, of make_train_function(), got the serial step of "
            "make_train_function_theano(); check the former, which is compared with the serial step"
        )

    def reported(self, take: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``take(*arguments)``: ``synk.on_step`` is about the steps of ranks."""
        return take(*arguments)

    def described(self) -> list[tuple[object, ...]]:
        """Return the rows of a table."""
        return [("functions", "of the compiler alone, for one process")]

    def __call__(self, values: Sequence[Any], batch: Any, num_slices: int) -> list[Any]:
        """Take a step; return the list of outputs. The result does not depend on `num_slices`."""
        rows: slice | numpy.ndarray
        if batch is None or isinstance(batch, (int, numpy.integer)):
            rows = slice(batch)
        else:
            rows = batch if isinstance(batch, slice) else numpy.asarray(batch)
        chosen = [
            _rows_of(value, rows) if scattered and value is not MISSING else value
            for value, scattered in zip(map(_usable, values), self._scattered)
        ]
        positional, named = self._inputs.select(range(len(chosen)), chosen)
        return self._function(*positional, **named)


def _usable(value: Any) -> Any:
    """Return an array that the compiler takes, and that is not wrong in BLAS because of its strides."""
    if not isinstance(value, numpy.ndarray) or value.flags.forc and value.flags.aligned:
        return value
    return numpy.array(value, order="C")


def _rows_of(value: Any, rows: slice | numpy.ndarray) -> Any:
    if isinstance(value, (list, tuple)):
        return numpy.asarray(value)[rows].tolist()  # the compiler casts lists, but not arrays
    return value[rows]


_GOLDEN = 0.6180339887498949  # multiples of it are spread evenly, modulo 1
_STEPS = (0.7548776662466927, 0.5698402909980532, 0.4301597090019468)  # along the axes
#: For a draw without an axis of rows: its sine and cosine, of 2 pi times it, are equal, so that normal
#: numbers, which are made of a vector of uniform ones by these, are all the same.
SAME_FOR_PAIRS = 0.125


def with_fixed_draws(definition: Definition) -> Definition:
    """Return a step with numbers that follow from the rows in place of random numbers.

    Raises
    ------
    ValueError
        If the script draws no random numbers.
    """
    roots = [spec.variable for spec in definition.outputs]
    roots += [item.new for item in [*definition.updates, *definition.grad_updates] if not item.is_own]
    draws = draws_in(inputs_first(roots, operands_with(definition.givens)))
    if not draws:
        raise ValueError("check: random=True is for steps that draw random numbers; this one does not")
    by_row = _number_of_each_row(definition)
    of_rows = Dependence(definition.rows, definition.givens)
    fixed = {draw: _fixed(draw, by_row, bool(of_rows.of(_size(draw)))) for draw in draws}
    return definition._replace(givens={**definition.givens, **fixed})


def _size(draw: Variable) -> Variable:
    """Return the shape of a draw, computed from the operands of the draw."""
    size, *parameters = draw.owner.inputs[1:]
    is_given = getattr(size.type, "ndim", None) == 1 and not _is_empty(size)
    if is_given:
        return size
    return sum(parameters[1:], parameters[0]).shape


def _is_empty(size: Variable) -> bool:
    data = getattr(size, "data", None)
    return data is not None and not len(data)


def _number_of_each_row(definition: Definition) -> Variable:
    """Return a vector with a number for each row, which depends on the contents of the row."""
    rows, axis = next(iter(definition.rows.items()))
    others = [index for index in range(rows.ndim) if index != axis]
    numbers = tt.cast(rows, "float64")
    return numbers.sum(axis=others) if others else numbers


def _fixed(draw: Variable, by_row: Variable, has_rows: bool) -> Variable:
    """Return numbers of the shape and the type of a draw."""
    size, length = _size(draw), by_row.shape[0]
    total, is_by_row = tt.constant(numpy.float64(0)), tt.constant(numpy.int8(0))
    for axis in range(draw.ndim):
        places = tt.arange(size[axis])
        along = tt.cast(places, "float64") * _STEPS[axis % len(_STEPS)]
        if has_rows:  # along the first axis of this length
            is_axis = tt.eq(size[axis], length) * (1 - is_by_row)
            along = tt.switch(is_axis, by_row[places % length], along)
            is_by_row = is_by_row + tt.cast(is_axis, "int8")
        order: list[Any] = ["x"] * draw.ndim
        order[axis] = 0
        total = total + along.dimshuffle(*order)
    numbers = (total * _GOLDEN) % 1
    if has_rows:
        numbers = tt.switch(is_by_row, numbers, SAME_FOR_PAIRS)
    if not draw.dtype.startswith("float"):
        numbers = numbers < 0.5
    numbers = names.with_pattern(tt.cast(numbers, draw.dtype), draw.type.broadcastable)
    return draw.type.filter_variable(numbers)
