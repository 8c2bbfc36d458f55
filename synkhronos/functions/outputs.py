"""The outputs of a call: how a rank sends them, and how the master reduces them to one value.

===========================  ====================================================
Output                       Form in which it is sent
===========================  ====================================================
the master's own             an array, not copied
a floating-point scalar      a float
an array of up to 4 kB       dtype, shape and bytes: pickling an array takes ten
                             times as long
a larger array               a handle to shared memory
None, instead of an array    `NO_ARRAY`
nothing is sent, as the      None
communicator has reduced it
===========================  ====================================================
"""

from __future__ import annotations

import enum
from typing import Any, Sequence, Tuple

import numpy as np

from synkhronos._errors import MissingRankError
from synkhronos.arithmetic.operations import GATHER, NUMPY, OPERATIONS, PIECE_BYTES
from synkhronos.stores.handle import Handle
from synkhronos.world.rank_state import RankState
from synkhronos.world.world import World

#: For each rank, its number of rows, followed by its outputs in the form in which they were sent
_Results = Sequence[Tuple[Any, ...]]

_SMALL = 4096  # bytes


class _Mark(enum.Enum):
    """In place of an output that is no array. Each is one object on every rank."""

    NO_ARRAY = "an operation has returned None in place of an array"
    REDUCED = "the communicator has reduced it to the master"


NO_ARRAY, REDUCED = _Mark


def pack(state: RankState, mode: str | None, value: Any) -> Any:
    """Return an output of this rank as it is sent; None if there is nothing to send."""
    if value is REDUCED:
        return None
    if mode is None:
        return state.engine.to_host(value) if state.is_master else None
    if value is None:
        return NO_ARRAY
    if value.ndim == 0 and value.dtype.kind == "f":
        return value.item()
    if state.is_master:
        return state.engine.to_host(value)
    if value.size * value.dtype.itemsize > _SMALL:
        return state.send(value)
    array = state.engine.to_host(value)
    return array.dtype.str, array.shape, array.tobytes()


def unpack(state: RankState, packed: Any) -> Any:
    """Return an output as the rank computed it: an array, which may be read-only, or a number."""
    if type(packed) is tuple:
        dtype, shape, data = packed
        return np.ndarray(shape, dtype, data)
    return state.store.get(packed) if isinstance(packed, Handle) else packed


# Reduced by the communicator


def reduce_in_place(
    state: RankState,
    modes: Sequence[str | None],
    values: Sequence[Any],
    indices: Sequence[int],
    n_rows: int,
) -> list[Any]:
    """Reduce the values that the communicator supports; only the master keeps the results.

    Parameters
    ----------
    modes : list of str or None
        The operation for each output.
    values : list of arrays
        The outputs of this rank.
    indices : list of int
        Their indices among the outputs of the function.
    n_rows : int
        The number of rows of this rank.

    Raises
    ------
    ValueError
        If an output is None on this rank, or so small on others that they do not reduce it here.
    """
    values = list(values)
    _check_are_arrays(state, modes, values, indices)
    for op in OPERATIONS:
        chosen = [
            position
            for position, (mode, value) in enumerate(zip(modes, values))
            if mode == op and state.comm.takes(value)
        ]
        if not chosen:
            continue
        arrays = [values[position] for position in chosen]
        try:
            reduced = state.comm.reduce(arrays, op, state.master_rank, n_rows)
        except MissingRankError as error:
            shapes = [f"output {indices[item]} {values[item].shape}" for item in chosen]
            raise ValueError(
                f"{op}: outputs cannot be combined, as their shapes differ between the ranks: on rank "
                f"{state.rank}, {', '.join(shapes)}; on another rank, one of them is much smaller"
            ) from error
        for position, value in zip(chosen, reduced):
            values[position] = value if state.is_master else REDUCED
    return values


def _check_are_arrays(
    state: RankState, modes: Sequence[str | None], values: Sequence[Any], indices: Sequence[int]
) -> None:
    """Raise if an operation has returned None, as the other ranks may have an array to reduce."""
    for index, mode, value in zip(indices, modes, values):
        if value is None and mode in OPERATIONS:
            raise ValueError(
                f"output {index} is None on rank {state.rank}, and cannot be reduced by {mode!r}: an "
                f"operation of its graph returns no array for some rows; have it return one for any "
                f"rows"
            )


# Reduced by the master


def collect(world: World, function: Any, subset: Sequence[int] | None, results: _Results) -> Any:
    """Return the outputs as the Theano function would, each reduced over the ranks that had rows.

    Parameters
    ----------
    subset : list of int or None
        The indices of the outputs; None for all.
    results : list of tuple
        For each rank, its number of rows, followed by its outputs in the form in which they were sent.
        A rank without rows has no outputs.
    """
    columns = zip(*results)
    weights: Any = next(columns)
    if world.step_hooks is not None:
        world.step_hooks.note(function.replica, weights)
    if 0 in weights:
        columns = zip(*[result for result in results if result[0]])
        weights = next(columns, None)
        if weights is None:
            raise ValueError(f"{function!r}: no rank had any rows to compute on (batch_s)")
    outputs: list[Any] = []
    replica = function.replica
    for index, values in enumerate(columns) if subset is None else zip(subset, columns):
        mode, first, last = replica.output_modes[index], values[0], values[-1]
        if type(first) is float and type(last) is float and mode != GATHER:
            try:
                value: float | np.ndarray | None = OPERATIONS[mode].reduce_floats(values, weights)
            except TypeError:  # another rank has no float
                value = _of_ranks(world, function, index, values, weights, results)
            outputs.append(np.asarray(value, replica.output_dtypes[index]))
        elif mode is None or first is None or last is None:
            # The master's own value, or a value that the communicator has reduced to the master
            outputs.append(_of_master(world, function, index, results)[len(outputs)])
        else:
            outputs.append(_of_ranks(world, function, index, values, weights, results))
    return outputs if function.form is True else in_form(function, outputs, subset)


def in_form(function: Any, values: list[Any], subset: Sequence[int] | None) -> Any:
    """Return the outputs as the Theano function would: one, a list, or a dictionary."""
    form = function.form
    if form is True or (form is False and subset is not None):
        return values
    if form is False:
        return values[0]
    return dict(zip(form if subset is None else [form[index] for index in subset], values))


def _of_master(world: World, function: Any, index: int, results: _Results) -> Sequence[Any]:
    n_rows, *outputs = results[world.master_rank]
    if not n_rows:
        raise ValueError(
            f"{function!r}: output {index} is the master's own value (op None), but the master had "
            f"no rows (batch_s)"
        )
    return outputs


def _of_ranks(
    world: World,
    function: Any,
    index: int,
    values: Sequence[Any],
    weights: Sequence[int],
    results: _Results,
) -> np.ndarray | None:
    """Return the output to which the values of the ranks with rows are combined."""
    active = [rank for rank, (n_rows, *_) in enumerate(results) if n_rows]
    if any([value is NO_ARRAY for value in values]):
        check_all_are_none(function, index, [value is NO_ARRAY for value in values], active)
        return None
    values = [unpack(world.rank_state, value) for value in values]
    return _combine(function, index, values, weights, active, world.master_rank)


def check_all_are_none(
    function: Any, index: int, are_none: Sequence[bool], ranks: Sequence[int]
) -> None:
    """Raise if an output is None on some of these ranks only."""
    those, others = (
        ", ".join([str(rank) for rank, is_none in zip(ranks, are_none) if is_none == wanted])
        for wanted in (True, False)
    )
    if others:
        raise ValueError(
            f"{function!r}: output {index} is None on rank(s) {those}, but not on rank(s) {others}: an "
            f"operation of its graph returns no array for some rows; have it return one for any rows"
        )


def _combine(
    function: Any,
    index: int,
    values: list[Any],
    weights: Sequence[int],
    active: Sequence[int],
    master: int,
) -> np.ndarray:
    mode = function.replica.output_modes[index]
    shapes = [np.shape(value) for value in values]
    if mode == GATHER:
        axis = function.replica.output_axes[index]
        others = [shape[:axis] + shape[axis + 1 :] for shape in shapes]
        if any([other != others[0] for other in others]):
            raise ValueError(
                f"{function!r}: output {index} cannot be gathered, its shapes differ in more than axis "
                f"{axis}: {_listed(active, shapes)}"
            )
        return NUMPY.concatenate(values, axis).astype(function.replica.output_dtypes[index], copy=False)
    if any([shape != shapes[0] for shape in shapes]):
        raise ValueError(
            f"{function!r}: output {index} cannot be reduced by {mode!r}, its shapes differ: "
            f"{_listed(active, shapes)}; use 'gather'"
        )
    operation = OPERATIONS[mode]
    if values[0].nbytes <= PIECE_BYTES:
        return operation.reduce(values, weights)
    # Sum into the memory of the master's own value if that is the first: allocating the pages of a new
    # array takes longer than the sum.
    if active[0] == master:
        values[0] = result = _own(values[0])
    else:
        result = np.empty(shapes[0], values[0].dtype)
    return operation.reduce_in_pieces(result, values, weights)


def _own(value: np.ndarray) -> np.ndarray:
    """Return an output of the master as an array that can be written to and returned."""
    fits = value.flags.c_contiguous and value.flags.writeable
    return value if fits else np.array(value, order="C")


def _listed(active: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(f"rank {rank}: {shape}" for rank, shape in zip(active, shapes))
