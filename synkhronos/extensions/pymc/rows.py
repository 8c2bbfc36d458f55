"""`Rows`: a sum over rows that the ranks share, and its gradient, as functions of the parameters."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Iterable, Iterator, Sequence

import numpy as np
from pytensor.compile.mode import Mode, get_mode

import synkhronos as synk
from synkhronos._typing import AnyArray
from synkhronos.extensions.pymc.first_evaluations import FirstEvaluations
from synkhronos.extensions.pymc.independence import is_finite_sum
from synkhronos.extensions.pymc.lost_errors import LostErrors
from synkhronos.extensions.pymc.serial import PlainSum, SerialSum, value_and_gradient
from synkhronos.functions.steps import turn_of

_POINTS = 3  # points at which it is tested whether the rows are independent
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
    plain : variable or None
        The sum as the model computes it without ranks, of `parameters` and the model's data.
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
    ) -> None:
        _check_lengths(name, variables, data)
        self.name, self.dtype = name, total.type.dtype
        self.parameters, self._total = list(parameters), total
        self.wrt = [index for index, wanted in enumerate(differentiable) if wanted]
        self._variables = list(variables)
        given = get_mode(mode)
        self._mode = Mode(given.linker, given.provided_optimizer.including(checks))
        self._data = [_as_data(*pair) for pair in zip(variables, data)]
        self._arguments: list[Any] = []  # the parameters as `Data`, when there are values
        self._functions = {True: self._build(True)}
        self._serial = SerialSum(name, self._functions[True], self._data, self.parameters, self.wrt)
        self._num_slices = max(1, self._serial.n_bytes // (_SLICE * synk.size()))
        model = None if plain is None else PlainSum(plain, self.parameters, self.wrt, self._mode)
        self._first = FirstEvaluations(self._serial, model)
        self._untested = _POINTS
        self._refusal: Exception | None = None  # the error that a test of this sum has raised
        self._lost = LostErrors(name)
        self._process = os.getpid()
        self.is_sent = False  # whether a program takes it to the ranks
        self.team: Any = None  # the ranks that evaluate it in a program, in place of all

    def __reduce__(self) -> Any:
        import pickle

        if self.is_sent:
            names = "name", "dtype", "parameters", "wrt", "_functions", "_data", "_num_slices"
            return _received, ({name: getattr(self, name) for name in names},)
        # PyMC then samples in this process, and says so.
        raise pickle.PicklingError(
            f"{self.name}: it cannot be copied or pickled, as it uses the ranks of this process; "
            f"sample with pm.sample(cores=1)"
        )

    def __repr__(self) -> str:
        return self.name

    @property
    def turn(self) -> Any:
        """The turn that an evaluation waits for, since samplers evaluate in threads of their own."""
        return turn_of(self._functions[True], waits=True)

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
            raise ValueError(
                f"{self.name}: expected that the log-probability is finite at one of {tried} points, "
                f"near the initial point or drawn from the prior, so that it can be tested whether it "
                f"is a sum over the rows. Give an initial point (initval), or priors, for which the "
                f"observed values are possible"
            )
        self._untested = 0

    def _evaluate(self, values: Sequence[Any], with_gradient: bool) -> AnyArray:
        if os.getpid() != self._process:
            raise synk.SynkhronosError(
                f"{self.name}: this process was forked from the one that has the ranks, and cannot use "
                f"them; sample the chains one after another, with pm.sample(cores=1)"
            )
        self._lost.note_thread()
        try:
            return self._evaluate_in_turn(values, with_gradient)
        except Exception as error:
            self._lost.report(error)
            raise

    def _evaluate_in_turn(self, values: Sequence[Any], with_gradient: bool) -> AnyArray:
        if self.team is not None:
            result: AnyArray = self.team.evaluate(self, values, with_gradient)
            return result
        try:
            with self.turn:  # the values are those of this thread until they have been used
                if self._refusal is not None:
                    raise self._refusal.with_traceback(None)
                if self._untested:
                    self._test_here(values)
                self._send(values)
                function = self._function(with_gradient)
                result = function(*self._data, *self._arguments, num_slices=self._num_slices)
                if not isinstance(result, np.ndarray):
                    raise RuntimeError(f"{self.name}: it cannot be evaluated inside a fuse() block")
                if not self._first.are_over:
                    self._compare(values, result)
                return result
        except (synk.ClosedError, synk.NotForkedError) as error:
            raise synk.ClosedError(
                f"{self.name}: its processes were closed; after synk.fork(), call parallelize() or "
                f"rows_potential() again"
            ) from error

    def build_all(self) -> None:
        """Build all functions, before a program uses them."""
        for with_gradient in (False, True):
            self._function(with_gradient)

    def part(
        self, rank: synk.Rank, values: Sequence[Any], with_gradient: bool, number: int, count: int
    ) -> AnyArray | None:
        """Return the sum, and its gradient, over a part of the rows, in a program; None without rows.

        Parameters
        ----------
        rank : Rank
            The rank that computes it.
        values : list of array
            The parameters.
        with_gradient : bool
            Whether the gradient follows.
        number, count : int
            Which part, of how many.
        """
        length = len(self._data[0])
        rows = slice(number * length // count, (number + 1) * length // count)
        if rows.start == rows.stop:
            return None
        slices = min(max(1, self._num_slices * rank.size // count), rows.stop - rows.start)
        function = self._functions[with_gradient]
        return np.asarray(rank.call(function, *self._data, *values, batch=rows, num_slices=slices))

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
            output = value_and_gradient(output, self.parameters, self.wrt)
        return synk.function(
            self._variables,
            (output, "sum"),
            bcast_inputs=self.parameters,
            mode=self._mode,
            name=self.name,
            on_unused_input="ignore",
        )


@contextlib.contextmanager
def sent_to_ranks(sums: Sequence[Rows]) -> Iterator[None]:
    """Inside the block, sums can be pickled for a program of the ranks."""
    for rows in sums:
        rows.is_sent = True
    try:
        yield
    finally:
        for rows in sums:
            rows.is_sent = False


def _received(parts: dict[str, Any]) -> Rows:
    """Return the sum that a rank has received with a program. Only a team of ranks can evaluate it."""
    rows = Rows.__new__(Rows)
    vars(rows).update(parts, team=None, _process=os.getpid(), _lost=LostErrors(parts["name"]))
    return rows


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


def _as_data(variable: Any, rows: Any) -> synk.Data:
    if not isinstance(rows, synk.Data):
        return synk.data(rows, var=variable, constant=True)
    if rows.dtype != variable.type.dtype or rows.ndim != variable.type.ndim:
        raise TypeError(
            f"data: {variable}: expected dtype {variable.type.dtype} and {variable.type.ndim} "
            f"dimension(s), got {rows!r}"
        )
    return rows
