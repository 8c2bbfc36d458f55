"""A rank's replica of a function: the arguments and variables with which it computes, and its errors.

Graphs with a fixed number of rows, or all rows, are errors where a rank has only a part of them.
"""

from __future__ import annotations

import contextlib
import copy
import re
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np

from synkhronos._errors import SynkhronosError, text_of
from synkhronos._typing import Compiled, SharedVariable
from synkhronos.arithmetic.conversion import usable
from synkhronos.engines.base import Engine, HardcodedRowCount
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.world.rank_state import RankState


class Window(NamedTuple):
    """The number of rows that an index selects.

    Attributes
    ----------
    lengths : compiled function
        Computes the numbers of rows in the new value of each variable, which must be equal.
    arguments : list of int
        The positions of its arguments among the arguments of the function: the arguments that are whole.
    names : list of str
        The variables that the rows replace.
    split : list of str
        The inputs that are split.
    """

    lengths: Compiled
    arguments: list[int]
    names: list[str]
    split: list[str]

    def length(self, engine: Engine, arguments: Sequence[Any], n_rows: int | None = None) -> int:
        """Return the number of rows; raise if it differs, also from the number of rows of the inputs."""
        chosen = [arguments[position] for position in self.arguments]
        lengths = [int(item) for item in engine.call(self.lengths, chosen)]
        if len(set(lengths)) > 1:
            listed = ", ".join(f"{name}: {length}" for name, length in zip(self.names, lengths))
            raise ValueError(
                f"givens: expected slices of the same number of rows, got {listed}; each rank has the "
                f"same rows of all of them"
            )
        if n_rows not in (None, lengths[0]):
            raise ValueError(
                f"givens: expected as many rows as of {', '.join(self.split)}, {n_rows} rows, got "
                f"{lengths[0]} rows that replace {', '.join(self.names)}; each rank has the same rows "
                f"of all of them. Give an input that has no such rows, or an index that selects none, "
                f"in bcast_inputs"
            )
        return lengths[0]


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
    axes : list of int, str or None
        The axis of the rows of each argument, `BOUND` for a bound of the window; None without rows.
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
    axes: list[int | str | None]
    sliceable: list[int]
    updates: list[tuple[int, str | None]]
    has_collectives: bool = False
    uses_master: bool = False
    joint: frozenset[int] = frozenset()
    fixed: Sequence[HardcodedRowCount] = ()

    @property
    def has_rows(self) -> bool:
        """Whether the ranks divide rows among them in calls."""
        return any(axis is not None for axis in self.axes)


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


# Graphs that need another number of rows


_MOST = 3  # operations that a message names
_SHAPES = re.compile("^Inputs shapes: (.*)$", re.MULTILINE)  # where the compiler's errors list them


def check_all_are_used(replica: Replica, n_all: int | None, n_rows: int) -> None:
    """Raise an error if a graph uses fewer rows than a call has, or divides them into as many groups.

    Parameters
    ----------
    n_all : int or None
        The number of rows of the call, if it is known.
    n_rows : int
        The number of rows with which this rank computes the graph.
    """
    if n_all is not None and n_all != n_rows:
        found = [item for item in replica.fixed if item.regroups and item.number == n_all]
        if found:
            raise ValueError(f"reshape: {_words(found, n_all, n_rows)}")
        steps = min([item.number for item in replica.fixed if item.cuts], default=n_all)
        if steps < n_all:
            raise ValueError(
                f"scan: n_steps={steps} uses the first {steps} of the {n_all} rows of the call, but "
                f"each rank would use {steps} of its own. Leave out n_steps, and choose rows by "
                f"batch={steps}"
            )


def explained(error: Exception, replica: Replica, n_all: int | None, n_rows: int) -> Exception | None:
    """Return an error that says which rows this rank has, and why they do not fit; None for others."""
    is_other = isinstance(error, (MemoryError, SynkhronosError))  # such as that another rank has failed
    if n_all is None or n_all in (1, n_rows) or is_other:
        return None
    reraise_if_handlers(error)
    found = [
        item
        for item in replica.fixed
        if item.number == n_all or (item.is_product and item.number % n_all == 0)
    ]
    text = text_of(error)
    first, _, rest = text.partition("\n")
    if found:
        return ValueError(f"{first}\n{_words(found, n_all, n_rows)}")
    kind, more = type(error), ""
    if kind not in (ValueError, IndexError):
        return None
    if kind is IndexError:
        more = ", which it numbers from 0: choose rows by their numbers before the call"
    elif _has_all_rows(text, n_all, n_rows):
        more = (
            f", and the operation also has an operand of {n_all}. If these are rows that are not "
            "divided, such as a part of a shared variable that an index selects, give them as an "
            "input; if an input is no rows, and every rank needs all of it, give it in bcast_inputs"
        )
    return kind(f"{first}\nthis rank computes {n_rows} of the {n_all} rows of the call{more}\n{rest}")


def _has_all_rows(text: str, n_all: int, n_rows: int) -> bool:
    """Whether an operation has failed with operands of all rows and operands of this rank's rows."""
    shapes = _SHAPES.search(text)
    return shapes is not None and {n_all, n_rows} <= set(map(int, re.findall(r"\d+", shapes[1])))


def _words(found: Sequence[HardcodedRowCount], n_all: int, n_rows: int) -> str:
    numbers = ", ".join(map(str, dict.fromkeys(item.number for item in found)))
    listed = "; ".join([item.text for item in found[:_MOST]])
    return (
        f"this rank computes {n_rows} of the {n_all} rows of the call; the graph fixes {numbers}, by "
        f"{listed}. Use the number of rows of an array, as x.shape[0], in its place, or flatten(2) in "
        f"place of a reshape"
    )
