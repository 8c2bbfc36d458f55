"""`Rows`: a sum over rows that the ranks share, and its gradient, as functions of the parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import weakref
from abc import ABC, abstractmethod
from typing import Any, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pytensor
from pytensor import config
from pytensor.compile.mode import Mode, get_mode
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.gradient import NullTypeGradError
from pytensor.graph.traversal import ancestors

import synkhronos as synk
from synkhronos._text import listed
from synkhronos._typing import AnyArray
from synkhronos.engines.analysis.result_dependence import recurrent
from synkhronos.extensions.pymc.compiled import keeping_contiguous
from synkhronos.extensions.pymc.lost_errors import LostErrors
from synkhronos.extensions.pymc.resident import ResidentSum
from synkhronos.extensions.pymc.serial import (
    CHECKS,
    PlainSum,
    SerialSum,
    n_bytes,
    value_and_gradient,
)
from synkhronos.functions.steps import call_on_change

_POINTS = 3  # points at which it is tested whether the rows are independent
_SLICE = 4 << 20  # bytes of rows in a slice, so that they and intermediate results stay in the cache


@dataclasses.dataclass
class SumOnRanks:
    """A sum over rows as every rank has it: compiled functions, and the rows in shared memory.

    Attributes
    ----------
    name : str
        Its name in error messages.
    dtype : str
        Its dtype.
    parameters : list of variables
        The parameters.
    wrt : list of int
        The positions of the parameters with respect to which there is a gradient.
    data : list of Data
        The rows.
    num_slices : int
        In how many slices a rank computes its share of the rows.
    functions : dict
        The functions of the rows and the parameters, by whether they return the gradient as well.
    no_gradient : str
        Why there is no gradient, if there is none.
    """

    name: str
    dtype: str
    parameters: list[Any]
    wrt: list[int]
    data: list[synk.Data]
    num_slices: int
    functions: dict[bool, synk.Function]
    no_gradient: str

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
        length = len(self.data[0])
        rows = slice(number * length // count, (number + 1) * length // count)
        if rows.start == rows.stop:
            return None
        slices = min(max(1, self.num_slices * rank.size // count), rows.stop - rows.start)
        function = self.functions[with_gradient]
        return np.asarray(rank.call(function, *self.data, *values, batch=rows, num_slices=slices))


class EvaluatedSum(ABC):
    """A sum over rows that operations of a graph evaluate, in the process that made this.

    Parameters
    ----------
    on_ranks : SumOnRanks
        What the ranks have of it.
    """

    def __init__(self, on_ranks: SumOnRanks) -> None:
        self.on_ranks = on_ranks
        self.name, self.dtype = on_ranks.name, on_ranks.dtype
        self.parameters, self.wrt = on_ranks.parameters, on_ranks.wrt
        self._lost = LostErrors(self.name)
        self._process = os.getpid()
        slices = on_ranks.num_slices * synk.size()
        #: Evaluations without Python, by whether they return the gradient
        self.resident = {kind: ResidentSum(self.name, slices) for kind in (False, True)}

    def __reduce__(self) -> Any:
        # PyMC then samples in this process, and says so; Numba does not put it into its cache.
        raise pickle.PicklingError(
            f"{self.name}: it cannot be copied or pickled, as it uses the ranks of this process; "
            f"sample with pm.sample(cores=1)"
        )

    def __repr__(self) -> str:
        return self.name

    def vector(self, values: Sequence[Any], with_gradient: bool) -> AnyArray:
        """Return a vector of the sum over all rows and, if that is wanted, of all derivatives."""
        if os.getpid() != self._process:
            raise synk.SynkhronosError(
                f"{self.name}: this process was forked from the one that has the ranks, and cannot use "
                f"them; sample the chains one after another, with pm.sample(cores=1)"
            )
        self._lost.note_thread()
        try:
            found = self.resident[with_gradient].evaluate(values)
            if found is None:
                found = np.atleast_1d(self._evaluate_here(values, with_gradient))
            return found
        except Exception as error:
            self._lost.report(error)
            raise

    @abstractmethod
    def _evaluate_here(self, values: Sequence[Any], with_gradient: bool) -> AnyArray:
        """Return the sum, or the vector that also has its gradient."""


class Sources:
    """What rows are computed from, as by ``pm.Data`` whose values ``pm.set_data`` replaces.

    Parameters
    ----------
    graphs : dict
        Graphs of shared variables, by the number of the array of rows that they compute.
    fixed : list of SharedVariable
        Others, whose values were used to find the rows.

    Attributes
    ----------
    shared : list of SharedVariable
        All of these shared variables.
    """

    def __init__(
        self, graphs: Mapping[int, Any] | None = None, fixed: Sequence[SharedVariable] = ()
    ) -> None:
        self._graphs, self._fixed = dict(graphs or {}), list(fixed)
        found = dict.fromkeys([*ancestors(self._graphs.values()), *fixed])
        self.shared = [variable for variable in found if isinstance(variable, SharedVariable)]
        self._seen = self._new = [_value(item) for item in self.shared]
        self._compute: Any = None

    def changed(self) -> dict[int, AnyArray]:
        """Return the rows whose sources have other values than those in use, by number.

        Raises
        ------
        ValueError
            If the rows cannot be computed from the new values.
        """
        values = [_value(item) for item in self.shared]
        new = [item for item, old, now in zip(self.shared, self._seen, values) if old is not now]
        if not new:
            return {}
        fixed = [str(item) for item in new if item in self._fixed]
        if fixed:
            raise ValueError(
                f"the rows were chosen by the values of {listed(fixed)}, which have changed; call "
                f"parallelize again"
            )
        if self._compute is None:
            graphs = list(self._graphs.values())
            self._compute = pytensor.function([], graphs, mode="FAST_COMPILE")
        self._new = values
        return dict(zip(self._graphs, self._compute()))

    def use(self) -> None:
        """Note that the rows that were returned last are in use."""
        self._seen = self._new


def _value(shared: SharedVariable) -> Any:
    """Return the value of a shared variable itself; another one takes its place when it is set."""
    return shared.get_value(borrow=True)


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
        checks: str = CHECKS,
        plain: Any = None,
        sources: Sources | None = None,
        model: Any = None,
    ) -> None:
        _check_lengths(name, variables, data)
        _check_steps(name, total, variables, parameters)
        wrt, no_gradient = [index for index, wanted in enumerate(differentiable) if wanted], ""
        try:
            value_and_gradient(total, parameters, wrt)
        except (NotImplementedError, NullTypeGradError) as error:  # of an operation of the script's
            wrt, no_gradient = [], str(error)
        self._total, self._variables = total, list(variables)
        self._sources, self.model = sources or Sources(), model
        given = get_mode("NUMBA" if mode is None and _is_usual() else mode)
        self._mode = keeping_contiguous(Mode(given.linker, given.provided_optimizer.including(checks)))
        arrays = [_as_data(name, *pair) for pair in zip(variables, data)]
        super().__init__(
            SumOnRanks(
                name, total.type.dtype, list(parameters), wrt, arrays, slices_of(arrays), {}, no_gradient
            )
        )
        self._arguments: list[Any] = []  # the parameters as `Data`, when there are values
        of_model = None if plain is None else PlainSum(plain, self.parameters, wrt, self._mode)
        function = self._function(True)
        self._serial = SerialSum(name, function, arrays, self.parameters, wrt, of_model)
        self._untested = _POINTS
        self._are_noticed = False
        self._refusal: Exception | None = None  # the error that a test of this sum has raised

    @property
    def turn(self) -> Any:
        """The turn that an evaluation waits for, since samplers evaluate in threads of their own."""
        return self._function(True).call_lock.waited_for

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
                self._untested -= self._serial.is_finite_sum(values)
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

    def refresh(self) -> None:
        """Replace the rows whose sources have new values."""
        try:
            changed = self._sources.changed()
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        if changed:
            named = list(zip(self._variables, self.on_ranks.data))
            data = [changed.get(number, rows) for number, (_, rows) in enumerate(named)]
            _check_lengths(self.name, self._variables, data)
            arrays = [_as_data(self.name, *pair) for pair in zip(self._variables, data)]
            self.on_ranks.data, self.on_ranks.num_slices = arrays, slices_of(arrays)
            self._serial.take(arrays)
            self._sources.use()

    def depends_on(self, shared: Any) -> bool:
        """Whether the rows are computed from a shared variable."""
        container = getattr(shared, "container", None)
        return any(item.container is container for item in self._sources.shared)

    def _evaluate_here(self, values: Sequence[Any], with_gradient: bool) -> AnyArray:
        try:
            with self.turn:  # the values are those of this thread until they have been used
                self.refresh()
                if self._refusal is not None:
                    raise self._refusal.with_traceback(None)
                if self._untested:
                    with self._refused_from_now_on():
                        self._untested -= self._serial.is_finite_sum(values)
                self._send(values)
                function = self._function(with_gradient)
                data, slices = self.on_ranks.data, self.on_ranks.num_slices
                result = function(*data, *self._arguments, num_slices=slices)
                if not isinstance(result, np.ndarray):
                    raise RuntimeError(f"{self.name}: it cannot be evaluated inside a fuse() block")
                if not self._serial.was_compared:
                    with self._refused_from_now_on():
                        self._serial.compare(values, result)
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

            call_on_change(function, self._sources.shared, end)

    def build_all(self) -> None:
        """Build all functions, before a program uses them."""
        for with_gradient in (False, True):
            self._function(with_gradient)

    @contextlib.contextmanager
    def _refused_from_now_on(self) -> Iterator[None]:
        """Raise an error of a test again in all later evaluations."""
        try:
            yield
        except (ValueError, synk.MismatchError) as error:
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


def slices_of(data: Sequence[synk.Data]) -> int:
    """Return in how many slices a rank computes its share of rows."""
    return max(1, n_bytes(data) // (_SLICE * synk.size()))


class RecurrenceError(ValueError):
    """A loop along the rows computes each step from earlier ones."""


def _check_steps(name: str, total: Any, variables: Sequence[Any], parameters: Sequence[Any]) -> None:
    """Raise RecurrenceError if a loop along the rows computes each step from earlier ones."""
    axes = [0] * len(variables) + [None] * len(parameters)
    if recurrent([*variables, *parameters], axes, [total]):
        raise RecurrenceError(
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
