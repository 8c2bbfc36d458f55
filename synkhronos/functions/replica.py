"""A rank's replica of a function, and the arguments and variables with which it computes."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np

from synkhronos._typing import Compiled, SharedVariable
from synkhronos.arithmetic.conversion import usable
from synkhronos.engines.base import Engine, HardcodedRowCount
from synkhronos.functions.window import Window
from synkhronos.world.rank_state import RankState


class Replica(NamedTuple):
    """A rank's replica of a function: the compiled function, and its properties that calls need.

    Attributes
    ----------
    number : int
        The number by which all ranks know the function.
    compiled : compiled function
        The function of the compiler.
    output_modes : list of str or None
        How each output is reduced.
    output_dtypes : list of numpy.dtype
        The dtype of each output.
    output_axes : list of int
        The axis along which each output is gathered.
    window : Window or None
        The rows that an index selects in givens, if it does.
    sliceable : list of int
        The numbers of the sliceable shared variables.
    updates : list of (int, str or None)
        For each shared variable whose updates accumulate over slices: its number and the operation.
    has_collectives : bool
        Whether the ranks meet in the graph. Then all ranks have to compute, even without rows.
    uses_master : bool
        Whether some of the collectives take the master's value.
    joint : frozenset of int
        With collectives, the numbers of the updated variables whose new values depend on the rows
        through collectives only, if at all, so that they are the same on every rank.
    fixed : list of Fixed
        Numbers in the graph that may be numbers of rows.
    """

    number: int
    compiled: Compiled
    output_modes: list[str | None]
    output_dtypes: list[np.dtype[Any]]
    output_axes: list[int]
    window: Window | None
    sliceable: list[int]
    updates: list[tuple[int, str | None]]
    has_collectives: bool = False
    uses_master: bool = False
    joint: frozenset[int] = frozenset()
    fixed: Sequence[HardcodedRowCount] = ()


def serial_arguments(
    engine: Engine, replica: Replica, inputs: Sequence[Any], rows: Sequence[Any]
) -> list[Any]:
    """Return the arguments with which a function computes alone, on all rows.

    Parameters
    ----------
    inputs : list of arrays
        They may have any memory layout.
    rows : list of arrays
        The rows of the sliceable shared variables.
    """
    inputs, rows = ([usable(value) for value in each] for each in (inputs, rows))
    bounds = []
    if replica.window is not None:
        bounds = [np.array(0), np.array(replica.window.length(engine, inputs))]
    return [*inputs, *bounds, *rows, *([None] if replica.has_collectives else [])]


@contextlib.contextmanager
def on_copies(state: RankState, shareds: Sequence[SharedVariable]) -> Iterator[None]:
    """Let shared variables hold copies of their values inside the block, and the originals after it."""
    engine = state.engine
    olds = [engine.storage(shared) for shared in shareds]
    try:
        for shared, old in zip(shareds, olds):
            engine.store(shared, old.copy() if hasattr(old, "copy") else copy.deepcopy(old))
        yield
    finally:
        for shared, old in zip(shareds, olds):
            engine.store(shared, old)
