"""Taking rows: the rows of each argument of a call that a rank uses, all at once or in slices.

A `Column` is an argument and the rows of it that are used. All kinds of arguments are columns: inputs
that are split, whole inputs, rows of sliceable shared variables, and the bounds of the rows that an
index selects.

In slices, each rank calls the function once for each slice of its rows. If the ranks meet in collectives
of the graph, all of them compute the same number of slices. A rank with fewer rows than slices computes
one row again; its result is ignored.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple, Sequence

import numpy as np

from synkhronos._typing import Rows
from synkhronos.arithmetic.operations import Accumulator
from synkhronos.arithmetic.partition import share
from synkhronos.world.rank_state import RankState

if TYPE_CHECKING:
    from synkhronos.functions.replica import Replica

_COUNTS = struct.Struct("qq")


class Split(NamedTuple):
    """How an argument is split over the ranks.

    Attributes
    ----------
    axis : int
        The axis of the rows.
    minibatch : bool
        Whether the argument holds the rows of this batch only.
    """

    axis: int
    minibatch: bool


class RowLimit(NamedTuple):
    """A limit for rows whose number only the ranks know: rows in a window, and sliceable rows.

    Attributes
    ----------
    together, by_rank : int or None
        The largest number of rows of all ranks together, and of each rank.
    """

    together: int | None = None
    by_rank: int | None = None


NO_LIMIT = RowLimit()


class Column(NamedTuple):
    """An argument, or the part of it that this rank uses.

    Attributes
    ----------
    source : array, Handle, Composite, or any object that is used as a whole
        The whole argument.
    rows : range, numpy.ndarray or None
        The rows of this rank; None if it uses all of the source.
    axis : int
        The axis of the rows.
    key : hashable
        Identifies the buffer into which rows are copied.
    """

    source: Any
    rows: Rows | None = None
    axis: int = 0
    key: Any = None

    def take(self, state: RankState) -> Any:
        """Return the argument of the compiled function."""
        if self.rows is None:
            return self.source
        return state.take(self.key, self.source, self.rows, self.axis)


class Bound(Column):
    """A bound of the rows: the first row if `source` is 0, the row after the last if it is 1."""

    def take(self, state: RankState) -> np.ndarray:
        rows: Any = self.rows  # a range
        return np.array((rows.start, rows.stop)[self.source])


def part_of(rows: Any, parts: int, index: int) -> Any:
    """Return a part of rows, or the last row if the part is empty.

    Ranks that have to compute although they have no rows, or none in a slice, do so with this row.
    """
    start, stop = share(len(rows), parts, index)
    return rows[start:stop] if start < stop else rows[max(len(rows) - 1, 0) :]


def compute_in_slices(
    call: Any, state: RankState, replica: Replica, columns: Sequence[Column], n_rows: int
) -> list[Any]:
    """Return the outputs for all slices; every slice reads the old values of updated variables.

    Parameters
    ----------
    call : CallFunction
        The call.
    replica : Replica
        The rank's replica of the function.
    columns : list of Column
        The arguments.
    n_rows : int
        The number of rows of this rank.
    """
    engine, most = state.engine, call.num_slices
    updates = [(number, state.shareds[number]) for number, _ in replica.updates]
    described = [*enumerate(zip(replica.output_modes, replica.output_axes))]
    outputs = [
        Accumulator(mode, engine.arithmetic, f"output {number}", axis=axis, most=most)
        for number, (mode, axis) in call.chosen(described)
    ]
    remedy = "op None, to keep the last"
    news = [
        Accumulator(op, engine.arithmetic, f"the update of {shared}", remedy, most=most)
        for (_, shared), (_, op) in zip(updates, replica.updates)
    ]
    olds = [engine.storage(shared) for _, shared in updates]
    try:
        for own, total, slices in _slices(call, state, replica, columns, n_rows):
            for (_, shared), old in zip(updates, olds):
                if engine.reads(replica.compiled, shared):
                    # An update may write in place.
                    engine.store(shared, None if old is None else old.copy())
            values = call.execute(state, replica, [column.take(state) for column in slices], own)
            for accumulator, value in zip(outputs, distinct(values) if own else ()):
                accumulator.add(value, own)
            for accumulator, (number, shared) in zip(news, updates):
                weight = total if number in replica.joint else own
                if weight:
                    accumulator.add(engine.storage(shared), weight)
    finally:
        for (_, shared), old in zip(updates, olds):
            engine.store(shared, old)
    results = [
        (shared, old, accumulator.result(engine.type_of(shared).dtype))
        for accumulator, (_, shared), old in zip(news, updates, olds)
        if not accumulator.is_empty
    ]
    for shared, old, new in results:
        engine.store(shared, None if new is None else engine.overwrite(old, new))
    dtypes = call.chosen(replica.output_dtypes) if n_rows else ()
    return [accumulator.result(dtype) for accumulator, dtype in zip(outputs, dtypes)]


def _slices(
    call: Any, state: RankState, replica: Replica, columns: Sequence[Column], n_rows: int
) -> Iterator[tuple[int, int, list[Column]]]:
    """Yield, for each slice, the rows of this rank, of all ranks that meet, and the columns."""
    # No more slices than rows; if sliceable variables differ in length, the shortest counts.
    shortest = min([len(column.rows) for column in columns if column.rows is not None])
    by_rank: Sequence[int]
    n_slices, by_rank = min(call.num_slices, max(shortest, 1)), [n_rows]
    if replica.has_collectives and state.size > 1:
        told = state.transport.exchange(_COUNTS.pack(n_slices, n_rows))
        most, by_rank = zip(*map(_COUNTS.unpack, told))
        n_slices = max(most)
    for index in range(n_slices):
        own, *each = [
            stop - start for start, stop in (share(item, n_slices, index) for item in (n_rows, *by_rank))
        ]
        yield (
            own,
            sum(each),
            [
                column
                if column.rows is None
                else column._replace(rows=part_of(column.rows, n_slices, index))
                for column in columns
            ],
        )


def distinct(values: Sequence[Any]) -> list[Any]:
    """Copy outputs that a subset names twice, so that the caller gets separate arrays."""
    return [
        value.copy()
        if value is not None and any([value is other for other in values[:position]])
        else value
        for position, value in enumerate(values)
    ]
