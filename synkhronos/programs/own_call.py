"""A call of a rank's own replica on its own rows; nothing is split or reduced."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos._text import listed
from synkhronos._typing import ArrayLike, Batch, Result
from synkhronos.arithmetic.conversion import usable
from synkhronos.arithmetic.partition import select, take_along
from synkhronos.arrays.data import Data
from synkhronos.functions import arguments
from synkhronos.functions.call import CallFunction, compute_in_slices
from synkhronos.functions.copies import Specification
from synkhronos.functions.function import Function
from synkhronos.functions.outputs import in_form
from synkhronos.functions.replica import Replica
from synkhronos.functions.signature import Input
from synkhronos.host.status import ROWS
from synkhronos.stores.handle import Composite
from synkhronos.world.rank_state import RankState


class OwnCall(CallFunction):
    """Computes on all rows that it is given. The handles are the values themselves."""

    def run(self, state: RankState) -> list[Any]:
        """Return the outputs of this rank's replica."""
        replica = state.functions[self.number]
        n_rows, arguments = self._arguments(state, replica)
        if not n_rows and self.num_slices > 1:
            raise ValueError("num_slices: there are no rows to slice")
        state.rows[self.number] = n_rows
        if self.has_rows(replica):
            state.progress[ROWS] += n_rows
        if self.num_slices > 1:
            values = compute_in_slices(self, state, replica, arguments, n_rows)
        else:
            values = self.execute(state, replica, arguments, n_rows)
        return [state.engine.to_host(value) for value in values]

    def _arguments(self, state: RankState, replica: Replica) -> tuple[int, list[Any]]:
        _, n_rows, columns = self._columns(state, replica, self.rows)
        if self.num_slices > 1:
            return n_rows, columns
        return n_rows, [column.take(state) for column in columns]

    def _whole(self, state: RankState, handle: Any) -> Any:
        return handle

    def _share(self, state: RankState, n_rows: int) -> tuple[int, range]:
        return n_rows, range(n_rows)

    def _batch_s(self, state: RankState) -> Batch | None:
        return self.batch_s  # type: ignore[return-value]  # that of this rank


class _Value(NamedTuple):
    """A value of an input, with the attributes that `arguments` reads from a `Data`."""

    array: Any
    minibatch: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


class _Matrix(Composite):
    """A sparse matrix of this rank."""

    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix

    def open(self, store: Any) -> Any:
        return self._matrix

    def rows(self, store: Any, rows: Any) -> Any:
        return take_along(self._matrix, rows, 0)


class _Callable(NamedTuple):
    """A function, with the attributes that `arguments` reads."""

    name: str | None
    inputs: list[Any]
    not_accumulated: list[str]
    form: list[str] | bool

    def __repr__(self) -> str:
        return f"<synkhronos.Function {self.name}>"


def check_no_options(function: Any, *options: Any) -> None:
    """Raise if a call of a compiler's own function has options that divide its inputs."""
    if options != (None, None, 1, None):
        raise TypeError(
            f"rank.call: expected only inputs for {function!r}, which runs on the given rows alone; "
            f"give it the rows to use, or build it with synk.function() for batch, batch_s, num_slices "
            f"and output_subset"
        )


def prepare(
    state: RankState,
    token: bytes,
    function: Any,
    args: Sequence[ArrayLike],
    named: Mapping[str, ArrayLike],
    batch: Batch | None,
    batch_s: Batch | None,
    num_slices: int,
    subset: Sequence[int] | None,
) -> tuple[OwnCall, Callable[[list[Any]], Result]]:
    """Return the command of a call of this rank's replica, and the function that converts its result.

    See `Rank.call`.
    """
    known = _specification(token, function)
    replica = state.functions.get(known.number)
    if replica is None:
        raise ValueError(
            f"rank.call: {function!r} is not replicated; call synk.distribute() before spmd()"
        )
    called = _Callable(function.name, known.inputs, known.not_accumulated, known.form)
    values = [
        _Value(*_converted(value, variable))
        for variable, value in zip(known.inputs, _filled(called, args, named))
    ]
    num_slices = arguments.check_num_slices(num_slices)
    rows = arguments.select_rows(called, values, batch)
    if num_slices > 1:
        arguments.check_slicing(state, called, replica)
    if subset is not None:
        subset = arguments.check_indices(subset, len(replica.output_modes), known.form)
    if batch_s is not None:
        if not replica.sliceable:
            raise ValueError(f"{called!r}: batch_s was given, but there are no sliceable_shareds")
        for number in replica.sliceable:
            select(batch_s, len(state.engine.storage(state.shareds[number])), "batch_s")
    splits = None
    if rows is not None:
        splits = [arguments.split_of(variable, value) for variable, value in zip(known.inputs, values)]
    handles = tuple([_in_call(value.array) for value in values])
    command = OwnCall(known.number, handles, splits, rows, batch_s, num_slices, subset)  # type: ignore[arg-type]
    return command, lambda values: in_form(called, values, subset)


def _specification(token: bytes, function: Function) -> Specification:
    if type(function) is not Function:
        raise TypeError(
            f"rank.call: expected a function built with synk.function() or a compiled function, got "
            f"{type(function).__name__}"
        )
    known = function.specification
    if known.token != token:
        raise ValueError(f"rank.call: the processes of {function!r} were closed")
    return known


def _filled(called: _Callable, args: Sequence[ArrayLike], named: Mapping[str, ArrayLike]) -> list[Any]:
    """Return a value for each input: the given value, or its default."""
    values = [
        arguments.default_of(variable) if value is arguments.MISSING else value
        for variable, value in zip(called.inputs, arguments.in_order(called, args, named))
    ]
    missing = [item.label for item, value in zip(called.inputs, values) if value is arguments.MISSING]
    if missing:
        raise TypeError(f"{called!r}: no value for {listed(missing)}; give one")
    return values


def _converted(value: Any, spec: Input) -> tuple[Any, bool]:
    """Return the value in the type of an input, and whether it holds the rows of one batch only."""
    minibatch = type(value) is Data and value.minibatch
    if type(value) is Data:
        value = value.data
    return usable(arguments.to_value(value, spec)), minibatch


def _in_call(value: Any) -> Any:
    is_sparse = not isinstance(value, np.ndarray) and hasattr(value, "tocsr")
    return _Matrix(value) if is_sparse else value
