"""A step whose random numbers are replaced by numbers that follow from the rows.

The ranks draw other numbers than one process would, so such a step cannot be compared with the serial
step. With these numbers it can: a row gets the same numbers on any rank.
"""

from __future__ import annotations

from typing import Any, Iterator

import numpy

from synkhronos.engines import names
from synkhronos.engines.analysis.graphs import Dependence, inputs_first, operands_with
from synkhronos.engines.names import Variable
from synkhronos.engines.names import tensor as tt
from synkhronos.extensions.steps.definition import Definition

_GOLDEN = 0.6180339887498949  # multiples of it are spread evenly, modulo 1
_STEPS = (0.7548776662466927, 0.5698402909980532, 0.4301597090019468)  # along the axes
#: For a draw without an axis of rows: its sine and cosine, of 2 pi times it, are equal, so that normal
#: numbers, which are made of a vector of uniform ones by these, are all the same.
_CONSTANT = 0.125


def with_fixed_draws(definition: Definition) -> Definition:
    """Return a step with numbers that follow from the rows in place of random numbers.

    Raises
    ------
    ValueError
        If the script draws no random numbers.
    """
    draws = list(_draws(definition))
    if not draws:
        raise ValueError("check: random=True is for steps that draw random numbers; this one does not")
    by_row = _number_of_each_row(definition)
    of_rows = Dependence(definition.rows, definition.givens)
    fixed = {draw: _fixed(draw, by_row, bool(of_rows.of(_size(draw)))) for draw in draws}
    return definition._replace(givens={**definition.givens, **fixed})


def _draws(definition: Definition) -> Iterator[Variable]:
    """Yield the arrays of random numbers that results are computed from."""
    roots = [spec.variable for spec in definition.outputs]
    roots += [item.new for item in [*definition.updates, *definition.grad_updates] if not item.is_own]
    for variable in inputs_first(roots, operands_with(definition.givens)):
        node = variable.owner
        if node is not None and isinstance(node.op, names.RANDOM) and variable is node.outputs[1]:
            yield variable


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
        numbers = tt.switch(is_by_row, numbers, _CONSTANT)
    if not draw.dtype.startswith("float"):
        numbers = numbers < 0.5
    numbers = names.with_pattern(tt.cast(numbers, draw.dtype), draw.type.broadcastable)
    return draw.type.filter_variable(numbers)
