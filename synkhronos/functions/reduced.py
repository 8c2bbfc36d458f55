"""Outputs that the communicator reduces to the master, instead of the master reducing them."""

from __future__ import annotations

from typing import Any, Sequence

from synkhronos._errors import MissingRankError
from synkhronos.arithmetic.operations import OPERATIONS
from synkhronos.functions.packed import REDUCED
from synkhronos.world.rank_state import RankState


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
    _check_arrays(state, modes, values, indices)
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
            shapes = [f"output {indices[one]} {values[one].shape}" for one in chosen]
            raise ValueError(
                f"{op}: outputs cannot be combined, as their shapes differ between the ranks: on rank "
                f"{state.rank}, {', '.join(shapes)}; on another rank, one of them is much smaller"
            ) from error
        for position, value in zip(chosen, reduced):
            values[position] = value if state.is_master else REDUCED
    return values


def _check_arrays(
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
