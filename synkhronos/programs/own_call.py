"""A call of a rank's own replica on its own rows; nothing is split or reduced."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos._typing import ArrayLike, Batch, Result
from synkhronos.arithmetic.conversion import usable
from synkhronos.arithmetic.partition import select
from synkhronos.arrays.data import Data
from synkhronos.arrays.objects import ObjectHandle
from synkhronos.functions import arguments
from synkhronos.functions.call import CallFunction, in_form
from synkhronos.functions.function import Function
from synkhronos.functions.signature import Input
from synkhronos.host.status import ROWS
from synkhronos.world.rank_state import RankState


class OwnCall(CallFunction):
    """Computes on all rows that it is given. Its arguments are the values themselves."""

    def run(self, state: RankState) -> list[Any]:
        """Return the outputs of this rank's replica."""
        replica = state.functions[self.number]
        _, n_rows, given = self._prepare(state, replica, self.rows)
        if not n_rows and self.num_slices > 1:
            raise ValueError("num_slices: there are no rows to slice")
        state.rows[self.number] = n_rows
        if replica.has_rows:
            state.progress[ROWS] += n_rows
        values = self.computation(state, replica)(given, n_rows)
        return [state.engine.to_host(value) for value in values]

    def _share(self, state: RankState, n_rows: int) -> tuple[int, range]:
        return n_rows, range(n_rows)


class _Value(NamedTuple):
    """A value of an input, with the attributes that `arguments` reads from a `Data`."""

    array: Any
    minibatch: bool
    is_object: bool  # a matrix, or used as a whole

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def handle(self) -> Any:
        """Return the value itself, in place of a handle."""
        return ObjectHandle(self.array) if self.is_object else self.array


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
    if type(function) is not Function:
        raise TypeError(
            f"rank.call: expected a function built with synk.function() or a compiled function, got "
            f"{type(function).__name__}"
        )
    known = function.specification
    if known.replica[0] != token:
        raise ValueError(f"rank.call: the processes of {function!r} were closed")
    replica = state.functions.get(known.replica[1])
    if replica is None:
        raise ValueError(
            f"rank.call: {function!r} is not replicated; call synk.distribute() before spmd()"
        )
    given = arguments.filled(None, known, arguments.in_order(known, args, named))
    values = [_converted(value, spec) for spec, value in zip(known.inputs, given)]
    command = arguments.make_call(OwnCall, state, known, replica, values, batch, num_slices, subset)
    if batch_s is not None:
        if not replica.sliceable:
            raise ValueError(f"{known!r}: batch_s was given, but there are no sliceable_shareds")
        for number in replica.sliceable:
            select(batch_s, len(state.engine.storage(state.shareds[number])), "batch_s")
        command.batch_s = {state.rank: batch_s}
    return command, lambda values: in_form(known, values, command.subset)


def _converted(value: Any, spec: Input) -> _Value:
    """Return a value in the type of an input."""
    is_data = type(value) is Data
    array = usable(arguments.to_value(value.data if is_data else value, spec))
    is_object = spec.axis is None or not isinstance(array, np.ndarray)
    return _Value(array, is_data and value.minibatch, is_object)
