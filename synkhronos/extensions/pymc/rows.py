"""`Rows`: a sum over rows that the ranks share, and its gradient, as functions of the parameters."""

from __future__ import annotations

import math
import os
from typing import Any, Sequence

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import Mode, get_mode

import synkhronos as synk
from synkhronos._typing import AnyArray
from synkhronos.functions.steps import turn_of

_TRIED = 1000  # rows on which a sum is tested
_SLICE = 4 << 20  # bytes of rows in a slice, so that they and intermediate results stay in the cache
_CHECKS = "local_check_parameter_to_ninf_switch"  # as in PyMC: a wrong parameter has the probability 0


class Rows:
    """The sum of a log-probability over rows that stay on the ranks.

    Parameters
    ----------
    name : str
        Its name in error messages.
    total : variable
        The sum, of `parameters` and `variables` only.
    parameters : list of variables
        The parameters.
    differentiable : list of bool
        Whether the gradient with respect to each parameter is wanted.
    variables : list of variables
        The variables that stand for the rows.
    data : list of array-like
        The rows, one array for each variable.
    mode : mode of PyTensor or None
        The mode in which the ranks compile.
    checks : str
        The name of PyMC's rewrite that determines the effect of a wrong parameter.
    """

    def __init__(
        self,
        name: str,
        total: Any,
        parameters: Sequence[Any],
        differentiable: Sequence[bool],
        variables: Sequence[Any],
        data: Sequence[Any],
        mode: Any = None,
        checks: str = _CHECKS,
    ) -> None:
        _check_lengths(name, variables, data)
        self.name, self.dtype = name, total.type.dtype
        self.parameters, self._total = list(parameters), total
        self.wrt = [index for index, wanted in enumerate(differentiable) if wanted]
        self._variables = list(variables)
        given = get_mode(mode)
        self._mode = Mode(given.linker, given.provided_optimizer.including(checks))
        self._data = [_as_data(*pair) for pair in zip(variables, data)]
        self._num_slices = max(1, sum(map(_n_bytes, self._data)) // (_SLICE * synk.size()))
        self._arguments: list[Any] = []  # the parameters as `Data`, when there are values
        self._functions = {True: self._build(True)}
        self._tried = False
        self._process = os.getpid()

    def __reduce__(self) -> Any:
        import pickle

        # PyMC then samples in this process, and says so.
        raise pickle.PicklingError(
            f"{self.name}: it cannot be copied or pickled, as it uses the ranks of this process; "
            f"sample with pm.sample(cores=1)"
        )

    def __repr__(self) -> str:
        return self.name

    @property
    def turn(self) -> Any:
        """The turn that an evaluation takes."""
        return turn_of(self._functions[True])

    def sum(self, values: Sequence[Any]) -> AnyArray:
        """Return the sum over all rows."""
        return self._evaluate(values, False)

    def sum_and_gradient(self, values: Sequence[Any]) -> list[AnyArray]:
        """Return the sum over all rows, and the gradient for each parameter that is differentiable."""
        flat = self._evaluate(values, True)
        results, start = [flat[0]], 1
        for index in self.wrt:
            shape = values[index].shape
            stop = start + values[index].size
            results.append(flat[start:stop].reshape(shape))
            start = stop
        return results

    def try_halves(self, values: Sequence[Any]) -> None:
        """Raise ValueError unless the sums over two halves of the rows add up to the sum over all rows.

        At most 1000 of the rows are tested, in this process.
        """
        length = len(self._data[0])
        chosen = [one[:: -(-length // _TRIED)] for one in map(np.asarray, self._data)]
        self._tried = True
        half = len(chosen[0]) // 2
        if not half:
            return
        first, second = ([one[:half] for one in chosen], [one[half:] for one in chosen])
        function = self._function(True)
        try:
            whole, *halves = [function.as_theano(*rows, *values)[0] for rows in (chosen, first, second)]
        except (ValueError, IndexError, TypeError, AssertionError) as error:
            raise ValueError(
                f"{self.name}: the log-probability cannot be computed for a part of the rows. Every "
                f"array with an item for each row has to be in `data`, with the rows on axis 0, and no "
                f"random variable may have an item for each row. With a part of them: "
                f"{str(error).splitlines()[0]}"
            ) from error
        scale = max(map(abs, (whole, *halves)))
        tolerance = 1e3 * np.finfo(whole.dtype).eps ** 0.75  # sums of many terms are rounded
        if np.isfinite(scale) and abs(sum(halves) - whole) > tolerance * scale:
            raise ValueError(
                f"{self.name}: the log-probability is not a sum over the rows: of {len(chosen[0])} rows "
                f"it is {whole:.10g}, of the two halves of them {halves[0]:.10g} and {halves[1]:.10g}. "
                f"The terms of different rows must not depend on each other, as they do if they are "
                f"correlated, or contain a mean over the rows"
            )

    def _evaluate(self, values: Sequence[Any], with_gradient: bool) -> AnyArray:
        if os.getpid() != self._process:
            raise synk.SynkhronosError(
                f"{self.name}: this process was forked from the one that has the ranks, and cannot use "
                f"them; sample the chains one after another, with pm.sample(cores=1)"
            )
        try:
            with self.turn:  # the values are those of this thread until they have been used
                if not self._tried:
                    self.try_halves(values)
                self._send(values)
                function = self._function(with_gradient)
                result = function(*self._data, *self._arguments, num_slices=self._num_slices)
        except (synk.ClosedError, synk.NotForkedError) as error:
            raise synk.ClosedError(
                f"{self.name}: its processes were closed; after synk.fork(), call parallelize() or "
                f"rows_potential() again"
            ) from error
        if not isinstance(result, np.ndarray):
            raise RuntimeError(f"{self.name}: it cannot be evaluated inside a fuse() block")
        return result

    def _send(self, values: Sequence[Any]) -> None:
        """Write the parameters to shared memory."""
        if not self._arguments:
            self._arguments = [synk.data(value, var=one) for value, one in zip(values, self.parameters)]
            return
        for argument, value in zip(self._arguments, values):
            if argument.shape == value.shape:
                argument[...] = value
            else:
                argument.set_value(value)

    def _function(self, with_gradient: bool) -> synk.Function:
        if with_gradient not in self._functions:
            self._functions[with_gradient] = self._build(with_gradient)
        return self._functions[with_gradient]

    def _build(self, with_gradient: bool) -> synk.Function:
        output = self._total
        if with_gradient:
            wrt = [self.parameters[index] for index in self.wrt]
            gradients = pt.grad(output, wrt, disconnected_inputs="ignore") if wrt else []
            output = pt.concatenate([output[None], *(one.ravel() for one in gradients)])
        return synk.function(
            self._variables,
            (output, "sum"),
            bcast_inputs=self.parameters,
            mode=self._mode,
            name=self.name,
            on_unused_input="ignore",
        )


def _check_lengths(name: str, variables: Sequence[Any], data: Sequence[Any]) -> None:
    lengths = {}
    for position, (variable, rows) in enumerate(zip(variables, data)):
        shape = np.shape(rows) if not isinstance(rows, synk.Data) else rows.shape
        if not shape:
            raise ValueError(f"{name}: data: expected arrays with rows, got one of 0 dimensions")
        lengths[variable.name or f"data[{position}]"] = shape[0]
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{one}: {length}" for one, length in lengths.items())
        raise ValueError(f"{name}: data: expected arrays of equal numbers of rows, got {listed}")
    if not lengths or 0 in lengths.values():
        raise ValueError(f"{name}: data: expected at least one array, with at least one row")


def _n_bytes(data: synk.Data) -> int:
    return math.prod(data.shape) * data.dtype.itemsize


def _as_data(variable: Any, rows: Any) -> synk.Data:
    if not isinstance(rows, synk.Data):
        return synk.data(rows, var=variable, constant=True)
    if rows.dtype != variable.type.dtype or rows.ndim != variable.type.ndim:
        raise TypeError(
            f"data: {variable}: expected dtype {variable.type.dtype} and {variable.type.ndim} "
            f"dimension(s), got {rows!r}"
        )
    return rows
