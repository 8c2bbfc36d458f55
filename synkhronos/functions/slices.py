"""A call in slices: each rank calls the function once for each slice of its rows.

If the ranks meet in collectives of the graph, all of them compute the same number of slices. A rank with
fewer rows than slices computes one row again; its result is ignored.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Iterator, Sequence

from synkhronos.arithmetic.operations import Accumulator
from synkhronos.arithmetic.partition import share
from synkhronos.functions.columns import Bound, Column
from synkhronos.world.rank_state import RankState

if TYPE_CHECKING:
    from synkhronos._typing import SharedVariable
    from synkhronos.functions.replica import Replica

_COUNTS = struct.Struct("qq")


class Slices:
    """The slices of one call on this rank.

    Parameters
    ----------
    call : CallFunction
        The call.
    replica : Replica
        The rank's replica of the function.
    columns : list of Column or Bound
        The arguments.
    n_rows : int
        The number of rows of this rank.
    """

    def __init__(
        self,
        call: Any,
        state: RankState,
        replica: Replica,
        columns: Sequence[Column | Bound],
        n_rows: int,
    ) -> None:
        self._call, self._rank_state, self._replica = call, state, replica
        self._columns, self._n_rows = columns, n_rows

    def compute(self) -> list[Any]:
        """Return the outputs for all slices; every slice reads the old values of updated variables."""
        call, replica, engine = self._call, self._replica, self._rank_state.engine
        updates = [(number, self._rank_state.shareds[number], op) for number, op in replica.updates]
        outputs, news = self._accumulators(updates)
        olds = [engine.storage(shared) for _, shared, _ in updates]
        try:
            for own, total, columns in self._each():
                for (_, shared, _), old in zip(updates, olds):
                    if engine.reads(replica.compiled, shared):
                        # An update may write in place.
                        engine.store(shared, None if old is None else old.copy())
                arguments = [column.take(self._rank_state) for column in columns]
                values = call.execute(self._rank_state, replica, arguments, own)
                for accumulator, value in zip(outputs, distinct(values) if own else ()):
                    accumulator.add(value, own)
                for accumulator, (number, shared, _) in zip(news, updates):
                    weight = total if number in replica.joint else own
                    if weight:
                        accumulator.add(engine.storage(shared), weight)
        finally:
            for (_, shared, _), old in zip(updates, olds):
                engine.store(shared, old)
        results = [
            (shared, old, accumulator.result(engine.type_of(shared).dtype))
            for accumulator, (_, shared, _), old in zip(news, updates, olds)
            if not accumulator.is_empty
        ]
        for shared, old, new in results:
            engine.store(shared, None if new is None else engine.overwrite(old, new))
        dtypes = call.chosen(replica.output_dtypes) if self._n_rows else ()
        return [accumulator.result(dtype) for accumulator, dtype in zip(outputs, dtypes)]

    def _accumulators(
        self, updates: Sequence[tuple[int, SharedVariable, str | None]]
    ) -> tuple[list[Accumulator], list[Accumulator]]:
        """Return an accumulator for each output, and for the new value of each updated variable."""
        call, replica, most = self._call, self._replica, self._call.num_slices
        arithmetic, numbers = self._rank_state.engine.arithmetic, range(len(replica.output_modes))
        outputs = [
            Accumulator(mode, arithmetic, f"output {number}", axis=axis, most=most)
            for number, mode, axis in call.chosen(
                [*zip(numbers, replica.output_modes, replica.output_axes)]
            )
        ]
        remedy = "op None, to keep the last"
        news = [
            Accumulator(op, arithmetic, f"the update of {shared}", remedy, most=most)
            for _, shared, op in updates
        ]
        return outputs, news

    def _each(self) -> Iterator[tuple[int, int, list[Column | Bound]]]:
        """Yield, for each slice, the rows of this rank, of all ranks that meet, and the columns."""
        # No more slices than rows; if sliceable variables differ in length, the shortest counts.
        shortest = min([len(column.rows) for column in self._columns if column.rows is not None])
        by_rank: Sequence[int]
        n_slices, by_rank = min(self._call.num_slices, max(shortest, 1)), [self._n_rows]
        if self._replica.has_collectives and self._rank_state.size > 1:
            told = self._rank_state.transport.exchange(_COUNTS.pack(n_slices, self._n_rows))
            most, by_rank = zip(*map(_COUNTS.unpack, told))
            n_slices = max(most)
        for index in range(n_slices):
            start, stop = share(self._n_rows, n_slices, index)
            bounds = [share(n_rows, n_slices, index) for n_rows in by_rank]
            total = sum(stop - start for start, stop in bounds)
            yield stop - start, total, [column.slice(n_slices, index) for column in self._columns]


def distinct(values: Sequence[Any]) -> list[Any]:
    """Copy outputs that a subset names twice, so that the caller gets separate arrays."""
    return [
        value.copy() if value is not None and _is_among(value, values[:position]) else value
        for position, value in enumerate(values)
    ]


def _is_among(value: Any, others: Sequence[Any]) -> bool:
    return any([value is other for other in others])
