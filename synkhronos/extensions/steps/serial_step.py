"""A training step of the compiler alone, for one process."""

from __future__ import annotations

from typing import Any, Callable, NoReturn, Sequence

import numpy

from synkhronos.engines.names import clone, package
from synkhronos.extensions.steps.definition import Definition
from synkhronos.extensions.steps.step_inputs import MISSING


class SerialStep:
    """The serial step that a step on all ranks must equal. It is called like a `Step`."""

    def __init__(self, definition: Definition) -> None:
        inputs, options = definition.inputs, definition.options
        self._inputs = inputs
        self.name: str | None = options.get("name")
        self._scattered = [variable in definition.rows for variable in inputs.variables]
        pairs = [(update.target, update.new) for update in definition.updates]
        gradients = [(grad_update.target, grad_update.new) for grad_update in definition.grad_updates]
        self._update = None
        if gradients:
            if definition.has_further or not all(self._scattered):
                # Further updates read the values before the step, whichever function computes them.
                news = clone([new for _, new in pairs], replace=dict(gradients))
                pairs = [(target, new) for (target, _), new in zip(pairs, news)]
            else:  # as on all ranks: first the gradient, then the update
                self._update = package.function([], updates=pairs, **{**options, "name": "update"})
                pairs = gradients
        self._function = package.function(
            inputs.given,
            [spec.variable for spec in definition.outputs],
            updates=pairs,
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
        outputs = self._function(*positional, **named)
        if self._update is not None:
            self._update()
        return outputs


def _usable(value: Any) -> Any:
    """Return an array that the compiler takes, and that is not wrong in BLAS because of its strides."""
    if not isinstance(value, numpy.ndarray) or value.flags.forc and value.flags.aligned:
        return value
    return numpy.array(value, order="C")


def _rows_of(value: Any, rows: slice | numpy.ndarray) -> Any:
    if isinstance(value, (list, tuple)):
        return numpy.asarray(value)[rows].tolist()  # the compiler casts lists, but not arrays
    return value[rows]
