"""The part of each rank in a call: take its rows, compute, send the outputs.

A `Column` is an argument and the rows of it that are used. All kinds of arguments are columns: inputs
that are split, whole inputs, rows of sliceable shared variables, and the bounds of the rows that an
index selects.

In slices, each rank calls the function once for each slice of its rows. If the ranks meet in collectives
of the graph, all of them compute the same number of slices. A rank with fewer rows than slices computes
one row again; its result is ignored.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from typing import Any, Callable, Hashable, Iterator, Mapping, NamedTuple, Sequence, Tuple, Union

import numpy as np

from synkhronos._typing import Batch, Rows
from synkhronos.arithmetic.conversion import usable
from synkhronos.arithmetic.operations import Accumulator
from synkhronos.arithmetic.partition import as_slice, select, share
from synkhronos.engines.base import Engine
from synkhronos.functions.outputs import pack, reduce_in_place
from synkhronos.functions.peers import GraphPeers
from synkhronos.functions.replica import Replica, Window, check_all_are_used, explained, on_copies
from synkhronos.host.status import ROWS
from synkhronos.stores.handle import Composite, RequiredRows
from synkhronos.world.rank_state import Command, RankState

#: A range of rows as a tuple, an array of rows, or None for the same rows
_Change = Union[Tuple[int, int, int], np.ndarray, None]
#: The numbers of rows of all ranks, if known, and of this one; its arguments, or columns if in slices
_Prepared = Tuple[Union[int, None], int, Sequence[Any]]

_COUNTS = struct.Struct("qq")


class Argument(NamedTuple):
    """An argument of a call, and how it is split over the ranks.

    Attributes
    ----------
    handle : Handle or Composite
        The whole argument.
    axis : int or None
        The axis of the rows; None if every rank uses all of it.
    minibatch : bool
        Whether the argument holds the rows of this batch only.
    """

    handle: Any
    axis: int | None
    minibatch: bool


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


@dataclasses.dataclass(eq=False, repr=False)
class CallFunction(Command):
    """One call of a replicated function.

    Parameters
    ----------
    number : int
        The number of the function.
    arguments : tuple of Argument
        The arguments.
    rows : range, numpy.ndarray or None
        Rows of the whole data, to be divided among the ranks; None if no argument is split.
    batch_s : list, dict or None
        For each rank, the rows of the sliceable shared variables to use.
    num_slices : int
        The number of slices in which each rank computes.
    subset : list of int or None
        Outputs to compute.
    most : int, optional
        The largest number of rows of each rank, for rows whose number only the ranks know: in a window,
        and sliceable rows.
    """

    number: int
    arguments: tuple[Argument, ...]
    rows: Rows | None
    batch_s: Sequence[Batch | None] | Mapping[int, Batch] | None
    num_slices: int
    subset: list[int] | None
    most: int | None = None

    is_like_serial = True

    def __reduce__(self) -> tuple[Any, ...]:
        return CallFunction, tuple(vars(self).values())

    def changed(self, change: _Change) -> CallFunction:
        """Return the same call on other rows, a range as a tuple, which is faster to pickle."""
        if change is None:
            return self
        return dataclasses.replace(self, rows=_rows_of(change))

    def change_to(self, batch: Batch | None, size: int) -> _Change:
        length: int | None = None
        for handle, axis, is_minibatch in self.arguments:
            if axis is not None:
                if is_minibatch:
                    return None
                length = handle.shape[axis]
        if length is None:
            return None
        rows = select(batch, length)
        if len(rows) < size:  # functions may require that some ranks have rows
            return None
        return (rows.start, rows.stop, rows.step) if type(rows) is range else rows

    @property
    def options(self) -> tuple[Hashable, ...]:
        """The options by which calls of a function differ in kind."""
        subset = None if self.subset is None else tuple(self.subset)
        return self.num_slices > 1, self.batch_s is not None, subset

    def on_few(self, most: int, size: int) -> CallFunction:
        """Return the same call on some rows of each rank, evenly spaced if their number is known."""
        rows, n_rows = self.rows, most * size
        if rows is not None and len(rows) > n_rows:
            step = len(rows) // n_rows
            rows = rows[: n_rows * step : step]
        return dataclasses.replace(self, rows=rows, most=most)

    def bind(self, state: RankState) -> Callable[[_Change], Sequence[Any]]:
        """Return a function that returns the rows of this rank, and its outputs if it has any."""
        replica = state.functions[self.number]
        prepare, has_rows = self._preparation(state, replica), replica.has_rows

        def run(change: _Change) -> tuple[Any, ...]:
            n_all, n_rows, given = prepare(change)
            state.rows[self.number] = n_rows
            if has_rows:  # otherwise each rank counts as having one row
                state.progress[ROWS] += n_rows
            if not n_rows and not replica.has_collectives:
                return (0,)
            try:
                if self.num_slices > 1:
                    values = compute_in_slices(self, state, replica, given, n_rows)
                else:
                    values = self.execute(state, replica, given, n_rows)
            except Exception as error:
                better = explained(error, replica, n_all, self._at_once(n_rows))
                if better is None:
                    raise
                raise better from error
            return (n_rows, *self._send(state, replica, values, n_all)) if n_rows else (0,)

        return run

    def _preparation(self, state: RankState, replica: Replica) -> Callable[[_Change], _Prepared]:
        """Return a function that prepares the call on other rows, and keeps the views of arguments."""
        unchanged: Any = None  # what was prepared for the same rows, in this epoch of the store
        epoch, are_of_same = None, self._are_of_same_arrays(state, replica)
        views: Any = None  # each array, and what is before its rows in an index

        def prepare(change: _Change) -> _Prepared:
            nonlocal unchanged, epoch, views
            if change is None:
                if epoch is None or epoch != state.store.epoch:
                    unchanged = self._prepare(state, replica, self.rows)
                    epoch = state.store.epoch if self._is_constant(state, replica) else None
                return unchanged
            if not are_of_same or type(change) is not tuple:
                return self._prepare(state, replica, _rows_of(change))
            rows = range(*change)
            start, stop = share(len(rows), state.size, state.rank)
            if start == stop:
                return self._prepare(state, replica, rows)
            if views is None:  # set in one step, as a signal handler may raise
                views = [
                    (state.store.get(handle), None if axis is None else (slice(None),) * axis)
                    for handle, axis, _ in self.arguments
                ]
            own, arguments = as_slice(rows[start:stop]), []
            for array, before in views:
                arguments.append(array if before is None else array[before + (own,)])
            return len(rows), stop - start, arguments

        return prepare

    def _are_of_same_arrays(self, state: RankState, replica: Replica) -> bool:
        """Whether the arguments on any range of rows are views of the same arrays."""
        if not self._has_views(state, replica) or not state.store.is_shared or replica.fixed:
            return False
        is_on_device = type(state.engine).take is not Engine.take
        return self.num_slices == 1 and not is_on_device

    def warm_caches(self, state: RankState, change: _Change = None) -> None:
        call, replica = self.changed(change), state.functions[self.number]
        if call.num_slices == 1 and call._is_constant(state, replica):
            self._preparation(state, replica)(change)

    def needs(self, ranks: range, size: int) -> list[RequiredRows]:
        all_rows: Any = self.rows  # not None if an argument is split by them
        if all_rows is not None:
            start, _ = share(len(all_rows), size, ranks[0])
            _, stop = share(len(all_rows), size, ranks[-1])
            start = min(start, stop - 1)  # see `_columns`
        needed = []
        for handle, axis, is_minibatch in self.arguments:
            if isinstance(handle, Composite):
                needed += [RequiredRows(part) for part in handle.parts()]
            elif axis is None:
                needed.append(RequiredRows(handle))
            else:
                rows = range(start, stop) if is_minibatch else all_rows[start:stop]
                needed.append(RequiredRows(handle, rows, axis))
        return needed

    def execute(
        self, state: RankState, replica: Replica, arguments: Sequence[Any], n_rows: int
    ) -> list[Any]:
        """Call the compiled function once, with the other ranks if there are collectives in it."""
        if state.overlap is not None:
            state.overlap.forget()
        if replica.has_collectives:
            values = self._call_with_peers(state, replica, arguments, n_rows)
        else:
            values = state.engine.call(replica.compiled, arguments, self.subset)
        return values if self.subset is None else distinct(values)

    def _call_with_peers(
        self, state: RankState, replica: Replica, arguments: Sequence[Any], n_rows: int
    ) -> list[Any]:
        peers = None
        if state.size > 1:
            peers = state.peers.get(self.number)
            if peers is None:
                peers = state.peers[self.number] = GraphPeers(state, self.number)
            peers.weight, peers.is_whole = n_rows, self.num_slices == 1
        if n_rows:
            return state.engine.call(replica.compiled, [*arguments, peers], self.subset)
        # The updates would come from rows that belong to another rank.
        own = [state.shareds[number] for number, _ in replica.updates if number not in replica.joint]
        with on_copies(state, own):
            return state.engine.call(replica.compiled, [*arguments, peers], self.subset)

    def _share(self, state: RankState, n_rows: int) -> tuple[int, range]:
        """Return the number of rows of this rank, and their places, or that of the last row."""
        start, stop = share(n_rows, state.size, state.rank)
        return stop - start, range(min(start, max(stop - 1, 0)), stop)

    def title(self, state: RankState) -> str:
        name = getattr(state.functions[self.number].compiled, "name", None) or ""
        return f"function {os.path.basename(name)}"

    def describe(self, state: RankState) -> str:
        return f"{self.title(state)}, {state.rows.get(self.number, 0)} row(s) of this rank"

    def _prepare(self, state: RankState, replica: Replica, rows: Rows | None) -> _Prepared:
        n_all, n_rows, columns = self._columns(state, replica, rows)
        if self.num_slices > 1:
            return n_all, n_rows, columns
        return n_all, n_rows, [column.take(state) for column in columns]

    def _has_views(self, state: RankState, replica: Replica) -> bool:
        """Whether the arguments on a range of rows are views, except of inputs that travel along."""
        if state.store.epoch is None or replica.sliceable or replica.window is not None:
            return False
        return not any([isinstance(argument.handle, Composite) for argument in self.arguments])

    def _is_constant(self, state: RankState, replica: Replica) -> bool:
        """Whether the arguments are the same views whenever this command is repeated."""
        return type(self.rows) is not np.ndarray and self._has_views(state, replica)

    def _columns(
        self, state: RankState, replica: Replica, rows: Rows | None
    ) -> tuple[int | None, int, list[Column]]:
        """Return the numbers of rows of all ranks, if known, and of this one, and the arguments."""
        n_all, n_rows = None, 1
        if rows is not None:
            n_all = len(rows)
            n_rows, places = self._share(state, n_all)
            own = rows[places.start : places.stop]
        columns: list[Column] = []
        for position, (handle, axis, is_minibatch) in enumerate(self.arguments):
            if axis is not None:
                taken = places if is_minibatch else own
                columns.append(Column(handle, taken, axis, (self.number, position)))
            elif isinstance(handle, Composite):
                columns.append(Column(handle.open(state.store)))
            else:
                columns.append(Column(state.store.get(handle)))
        if replica.window is not None:
            n_all = self._length(state, replica.window, columns, n_all)
            n_rows, places = self._share(state, n_all)
            columns += [Bound(0, places), Bound(1, places)]
        if replica.sliceable:
            sliceable = [self._sliceable(state, number) for number in replica.sliceable]
            n_own = max([len(rows) for _, rows, *_ in sliceable])  # type: ignore[arg-type]  # not None
            if replica.has_collectives and not n_own:
                last = [range(max(len(source) - 1, 0), len(source)) for source, *_ in sliceable]
                sliceable = [column._replace(rows=item) for column, item in zip(sliceable, last)]
            columns += sliceable
            if n_all is None:
                n_rows = n_own
        if replica.fixed:
            check_all_are_used(replica, n_all, self._at_once(n_rows))
        return n_all, n_rows, columns

    def _at_once(self, n_rows: int) -> int:
        """Return the number of rows on which the function is computed, the largest of all slices."""
        return -(-n_rows // self.num_slices)

    def _sliceable(self, state: RankState, number: int) -> Column:
        """Return the column of a sliceable shared variable."""
        array = usable(state.sliceable(number))
        batch = None if self.batch_s is None else self.batch_s[state.rank]
        own = select(batch, len(array), "batch_s")[: self.most]
        return Column(array, own, 0, (self.number, "shared", number))

    def _length(
        self, state: RankState, window: Window, columns: Sequence[Column], n_rows: int | None
    ) -> int:
        """Return the number of rows of all ranks in the window, which is that of the inputs."""
        arguments = [column.source for column in columns]
        if self.most is None:
            return window.length(state.engine, arguments, n_rows)
        return min(window.length(state.engine, arguments), self.most * state.size)

    def _send(
        self, state: RankState, replica: Replica, values: Sequence[Any], n_all: int | None
    ) -> list[Any]:
        """Return the outputs in the form in which they are sent to the master."""
        modes = replica.output_modes if self.subset is None else self.chosen(replica.output_modes)
        if state.comm.reduces_in_place and self._all_have_rows(state, replica, n_all):
            indices = self.chosen(range(len(replica.output_modes)))
            values = reduce_in_place(state, modes, values, indices, state.rows[self.number])
        packed = []  # faster than a comprehension for a few items
        for mode, value in zip(modes, values):
            packed.append(pack(state, mode, value))
        return packed

    def chosen(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return the items for the outputs that are computed."""
        return items if self.subset is None else [items[index] for index in self.subset]

    def _all_have_rows(self, state: RankState, replica: Replica, n_all: int | None) -> bool:
        """Whether it is certain, without communication, that every rank has rows."""
        if n_all is None or self.rows is None:
            return not replica.sliceable and replica.window is None
        return n_all >= state.size


def _rows_of(change: tuple[int, int, int] | np.ndarray) -> Rows:
    return range(*change) if isinstance(change, tuple) else change


# Slices


def part_of(rows: Any, parts: int, index: int) -> Any:
    """Return a part of rows, or the last row if the part is empty.

    Ranks that have to compute although they have no rows, or none in a slice, do so with this row.
    """
    start, stop = share(len(rows), parts, index)
    return rows[start:stop] if start < stop else rows[max(len(rows) - 1, 0) :]


def compute_in_slices(
    call: CallFunction, state: RankState, replica: Replica, columns: Sequence[Column], n_rows: int
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
    call: CallFunction, state: RankState, replica: Replica, columns: Sequence[Column], n_rows: int
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
