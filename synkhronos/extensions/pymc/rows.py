"""`Rows`: a sum over rows that the ranks share, and its gradient, as functions of the parameters."""

from __future__ import annotations

import weakref
from typing import Any, Iterable, Sequence

import numpy as np
from pytensor import config
from pytensor.compile.mode import Mode, get_mode

import synkhronos as synk
from synkhronos._text import listed
from synkhronos._typing import AnyArray
from synkhronos.engines.analysis.result_dependence import recurrent
from synkhronos.extensions.pymc.compiled import keeping_contiguous
from synkhronos.extensions.pymc.serial import (
    FirstEvaluations,
    PlainSum,
    SerialSum,
    is_finite_sum,
    n_bytes,
    value_and_gradient,
)
from synkhronos.extensions.pymc.sources import Sources
from synkhronos.extensions.pymc.sums import EvaluatedSum, SumOnRanks
from synkhronos.functions.steps import call_on_change, turn_of

_POINTS = 3  # points at which it is tested whether the rows are independent
_SLICE = 4 << 20  # bytes of rows in a slice, so that they and intermediate results stay in the cache
_CHECKS = "local_check_parameter_to_ninf_switch"  # as in PyMC: a wrong parameter has the probability 0


class Rows(EvaluatedSum):
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
    plain : variable or None
        The sum as the model computes it without ranks, of `parameters` and the model's data.
    sources : Sources, optional
        What the rows are computed from.
    model : pymc.Model, optional
        The model that has the rows.
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
        plain: Any = None,
        sources: Sources | None = None,
        model: Any = None,
    ) -> None:
        _check_lengths(name, variables, data)
        _check_steps(name, total, variables, parameters)
        wrt = [index for index, wanted in enumerate(differentiable) if wanted]
        self._total, self._variables = total, list(variables)
        self._sources, self.model = sources or Sources(), model
        given = get_mode("NUMBA" if mode is None and _is_usual() else mode)
        self._mode = keeping_contiguous(Mode(given.linker, given.provided_optimizer.including(checks)))
        arrays = [_as_data(name, *pair) for pair in zip(variables, data)]
        super().__init__(
            SumOnRanks(name, total.type.dtype, list(parameters), wrt, arrays, _slices(arrays), {})
        )
        self._arguments: list[Any] = []  # the parameters as `Data`, when there are values
        self._serial = SerialSum(name, self._function(True), arrays, self.parameters, wrt)
        model = None if plain is None else PlainSum(plain, self.parameters, wrt, self._mode)
        self._first = FirstEvaluations(self._serial, model)
        self._untested = _POINTS
        self._are_noticed = False
        self._refusal: Exception | None = None  # the error that a test of this sum has raised

    @property
    def turn(self) -> Any:
        """The turn that an evaluation waits for, since samplers evaluate in threads of their own."""
        return turn_of(self._function(True), waits=True)

    def test(self, points: Iterable[Sequence[Any]]) -> None:
        """Raise ValueError unless the rows are independent at the first points where the sum is finite.

        Parameters
        ----------
        points : iterable of list of array
            Values of the parameters.
        """
        tried = 0
        with self.turn:
            for values in points:
                tried += 1
                self._untested -= is_finite_sum(self._serial, values)
                if not self._untested:
                    break
        if self._untested == _POINTS:
            data = self.on_ranks.data
            missing = [str(item) for item, rows in zip(self._variables, data) if np.isnan(np.sum(rows))]
            raise ValueError(
                f"{self.name}: expected that the log-probability is finite at one of {tried} points, "
                f"near the initial point or drawn from the prior, so that it can be tested whether it "
                f"is a sum over the rows. "
                + (
                    f"There are values that are not a number in {listed(missing)}; leave out their rows"
                    if missing
                    else "Give an initial point (initval), or priors, for which the observed values are "
                    "possible"
                )
            )
        self._untested = 0

    def refresh(self) -> bool:
        """Replace the rows whose sources have new values, and return whether there are any."""
        try:
            changed = self._sources.changed()
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        if changed:
            named = list(zip(self._variables, self.on_ranks.data))
            data = [changed.get(number, rows) for number, (_, rows) in enumerate(named)]
            _check_lengths(self.name, self._variables, data)
            arrays = [_as_data(self.name, *pair) for pair in zip(self._variables, data)]
            self.on_ranks.data, self.on_ranks.num_slices = arrays, _slices(arrays)
            self._serial.take(arrays)
            self._sources.use()
        return bool(changed)

    def depends_on(self, shared: Any) -> bool:
        """Whether the rows are computed from a shared variable."""
        return shared in self._sources

    def _evaluate_here(self, values: Sequence[Any], with_gradient: bool) -> AnyArray:
        try:
            with self.turn:  # the values are those of this thread until they have been used
                self.refresh()
                if self._refusal is not None:
                    raise self._refusal.with_traceback(None)
                if self._untested:
                    self._test_here(values)
                self._send(values)
                function = self._function(with_gradient)
                data, slices = self.on_ranks.data, self.on_ranks.num_slices
                result = function(*data, *self._arguments, num_slices=slices)
                if not isinstance(result, np.ndarray):
                    raise RuntimeError(f"{self.name}: it cannot be evaluated inside a fuse() block")
                if not self._first.are_over:
                    self._compare(values, result)
                elif not self.resident[with_gradient].is_impossible:
                    self._notice_new_values(function)
                    self.resident[with_gradient].begin(function, data, values, np.size(result))
                return result
        except (synk.ClosedError, synk.NotForkedError) as error:
            raise synk.ClosedError(
                f"{self.name}: its processes were closed; after synk.fork(), call parallelize() or "
                f"rows_potential() again"
            ) from error

    def _notice_new_values(self, function: synk.Function) -> None:
        """From now on, new values of what the rows are computed from end evaluations without Python."""
        if not self._are_noticed:
            self._are_noticed = True
            sums = weakref.WeakSet(self.resident.values())

            def end() -> None:
                for item in sums:
                    item.set_on(False)

            call_on_change(function, self._sources, end)

    def build_all(self) -> None:
        """Build all functions, before a program uses them."""
        for with_gradient in (False, True):
            self._function(with_gradient)

    def _test_here(self, values: Sequence[Any]) -> None:
        try:
            self._untested -= is_finite_sum(self._serial, values)
        except ValueError as error:
            self._refusal = error
            raise

    def _compare(self, values: Sequence[Any], result: AnyArray) -> None:
        try:
            self._first.compare(values, result)
        except synk.MismatchError as error:
            self._refusal = error
            raise

    def _send(self, values: Sequence[Any]) -> None:
        """Write the parameters to shared memory."""
        if not self._arguments:
            self._arguments = [
                synk.data(value, var=parameter) for value, parameter in zip(values, self.parameters)
            ]
            return
        for argument, value in zip(self._arguments, values):
            if argument.shape == value.shape:
                argument[...] = value
            else:
                argument.set_value(value)

    def _function(self, with_gradient: bool) -> synk.Function:
        functions = self.on_ranks.functions
        if with_gradient not in functions:
            functions[with_gradient] = self._build(with_gradient)
        return functions[with_gradient]

    def _build(self, with_gradient: bool) -> synk.Function:
        output = self._total
        if with_gradient:
            output = value_and_gradient(output, self.parameters, self.wrt)
        return synk.function(
            self._variables,
            (output, "sum"),
            bcast_inputs=self.parameters,
            mode=self._mode,
            name=self.name,
            on_unused_input="ignore",
        )


def _slices(data: Sequence[synk.Data]) -> int:
    return max(1, n_bytes(data) // (_SLICE * synk.size()))


def _check_steps(name: str, total: Any, variables: Sequence[Any], parameters: Sequence[Any]) -> None:
    """Raise ValueError if a loop along the rows computes each step from earlier ones."""
    axes = [0] * len(variables) + [None] * len(parameters)
    if recurrent([*variables, *parameters], axes, [total]):
        raise ValueError(
            f"{name}: a scan computes each step along the rows from earlier ones, as in one time "
            f"series, so they cannot be divided; several series can, if their shape is (series, time)"
        )


def _is_usual() -> bool:
    """Whether the script has chosen neither a mode nor a linker of PyTensor."""
    return bool(config.mode == "Mode" and config.linker == "auto")


def _check_lengths(name: str, variables: Sequence[Any], data: Sequence[Any]) -> None:
    lengths = {}
    for position, (variable, rows) in enumerate(zip(variables, data)):
        shape = np.shape(rows) if not isinstance(rows, synk.Data) else rows.shape
        if not shape:
            raise ValueError(f"{name}: data: expected arrays with rows, got one of 0 dimensions")
        lengths[variable.name or f"data[{position}]"] = shape[0]
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{item}: {length}" for item, length in lengths.items())
        raise ValueError(f"{name}: data: expected arrays of equal numbers of rows, got {listed}")
    if not lengths or 0 in lengths.values():
        raise ValueError(f"{name}: data: expected at least one array, with at least one row")


def _as_data(name: str, variable: Any, rows: Any) -> synk.Data:
    if np.ma.is_masked(rows):  # type: ignore[no-untyped-call]
        raise ValueError(
            f"{name}: data: {variable}: {np.count_nonzero(rows.mask)} value(s) are masked, and would "
            f"count as observed. Leave out their rows, or give the masked array as observed= of the "
            f"model's variable, so that PyMC imputes them"
        )
    if not isinstance(rows, synk.Data):
        return synk.data(rows, var=variable, constant=True)
    if rows.dtype != variable.type.dtype or rows.ndim != variable.type.ndim:
        raise TypeError(
            f"data: {variable}: expected dtype {variable.type.dtype} and {variable.type.ndim} "
            f"dimension(s), got {rows!r}"
        )
    return rows
