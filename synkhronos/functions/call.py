"""A call: each rank takes its rows, computes, and sends its outputs, which the master reduces.

A `Column` is an argument and the rows of it that are used. All kinds of arguments are columns: inputs
that are split, whole inputs, rows of sliceable shared variables, and the bounds of the rows that an
index selects.

In slices, each rank calls the function once for each slice of its rows. If the ranks meet in collectives
of the graph, all of them compute the same number of slices. A rank with fewer rows than slices computes
one row again; its result is ignored.

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

import dataclasses
import enum
import functools
import os
import struct
from typing import Any, Callable, Hashable, Iterator, Mapping, NamedTuple, Sequence, Tuple, Union

import numpy as np

from synkhronos._errors import MissingRankError
from synkhronos._typing import Batch, Rows
from synkhronos.arithmetic.conversion import usable
from synkhronos.arithmetic.operations import GATHER, NUMPY, OPERATIONS, PIECE_BYTES, Accumulator
from synkhronos.arithmetic.partition import as_slice, select, share, shares
from synkhronos.engines.base import Engine
from synkhronos.functions.peers import GraphPeers
from synkhronos.functions.replica import Replica, Window, check_all_are_used, explained, on_copies
from synkhronos.host.status import ROWS
from synkhronos.stores.handle import Composite, Handle, RequiredRows
from synkhronos.world.rank_state import Command, RankState
from synkhronos.world.world import World

#: A range of rows as a tuple, an array of rows, or None for the same rows
_Change = Union[Tuple[int, int, int], np.ndarray, None]
#: The numbers of rows of all ranks, if known, and of this one; its arguments, or columns if in slices
_Prepared = Tuple[Union[int, None], int, Sequence[Any]]

#: For each rank, its number of rows, followed by its outputs in the form in which they were sent
_Results = Sequence[Sequence[Any]]

_COUNTS = struct.Struct("qq")
_SMALL = 4096  # bytes of an output


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

    def part(self, parts: int, index: int) -> Column:
        """Return the column of a slice, with the last row if the slice has none.

        Ranks that have to compute although they have no rows, or none in a slice, do so with this row.
        """
        rows = self.rows
        if rows is None:
            return self
        start, stop = share(len(rows), parts, index)
        return self._replace(rows=rows[start:stop] if start < stop else rows[max(len(rows) - 1, 0) :])


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

    def prepare_changes(self, size: int) -> Callable[[Batch | None], _Change]:
        split = [item for item in self.arguments if item.axis is not None]
        if not split or any([item.minibatch for item in split]):
            return super().prepare_changes(size)
        length = split[-1].handle.shape[split[-1].axis]

        def change_to(batch: Batch | None) -> _Change:
            rows = select(batch, length)
            if len(rows) < size:  # functions may require that some ranks have rows
                return None
            return (rows.start, rows.stop, rows.step) if type(rows) is range else rows

        return change_to

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
        prepare, compute = self._preparation(state, replica), self.computation(state, replica)
        has_rows = replica.has_rows
        modes, indices = map(self.chosen, (replica.output_modes, range(len(replica.output_modes))))

        def run(change: _Change) -> Sequence[Any]:
            n_all, n_rows, given = prepare(change)
            state.rows[self.number] = n_rows
            if has_rows:  # otherwise each rank counts as having one row
                state.progress[ROWS] += n_rows
            if not n_rows and not replica.has_collectives:
                return (0,)
            try:
                values = compute(given, n_rows)
            except Exception as error:
                better = explained(error, replica, n_all, self._at_once(n_rows))
                if better is None:
                    raise
                raise better from error
            if not n_rows:
                return (0,)
            if state.comm.reduces_in_place and self._all_have_rows(state, replica, n_all):
                values = reduce_in_place(state, modes, values, indices, n_rows)
            packed: list[Any] = [n_rows]  # faster than a comprehension for a few items
            for mode, value in zip(modes, values):
                packed.append(pack(state, mode, value))
            return packed

        return run

    def _preparation(self, state: RankState, replica: Replica) -> Callable[[_Change], _Prepared]:
        """Return a function that prepares the call on other rows, and keeps the views of arguments."""
        store = state.store
        has_views = not (
            replica.sliceable
            or replica.window
            or any([isinstance(argument.handle, Composite) for argument in self.arguments])
        )
        # Whether the arguments on any range of rows are views of the same arrays
        are_of_same = has_views and store.is_shared and self.num_slices == 1 and not replica.fixed
        are_of_same = are_of_same and type(state.engine).take is Engine.take  # else on a device
        unchanged: Any = None  # what was prepared for the same rows, in this epoch of the store
        epoch, keeps = None, has_views and type(self.rows) is not np.ndarray
        views: Any = None  # each array, and what is before its rows in an index

        def prepare(change: _Change) -> _Prepared:
            nonlocal unchanged, epoch, views
            if change is None:
                if epoch is None or epoch != store.epoch:
                    unchanged = self._prepare(state, replica, self.rows)
                    epoch = store.epoch if keeps else None
                return unchanged
            if not are_of_same or type(change) is not tuple:
                return self._prepare(state, replica, _rows_of(change))
            rows = range(*change)
            start, stop = share(len(rows), state.size, state.rank)
            if start == stop:
                return self._prepare(state, replica, rows)
            if views is None:  # set in one step, as a signal handler may raise
                views = [
                    (store.get(handle), None if axis is None else (slice(None),) * axis)
                    for handle, axis, _ in self.arguments
                ]
            own, arguments = as_slice(rows[start:stop]), []
            for array, before in views:
                arguments.append(array if before is None else array[before + (own,)])
            return len(rows), stop - start, arguments

        if keeps and are_of_same:  # elsewhere, a rank may have only the rows of a change
            prepare(None)
        return prepare

    def needs(self, ranks: range, size: int) -> list[RequiredRows]:
        all_rows: Any = self.rows  # not None if an argument is split by them
        if all_rows is not None:
            start, _ = share(len(all_rows), size, ranks[0])
            _, stop = share(len(all_rows), size, ranks[-1])
            places = range(min(start, stop - 1), stop)  # see `_share`
        needed = []
        for handle, axis, is_minibatch in self.arguments:
            if isinstance(handle, Composite):
                needed += [RequiredRows(part) for part in handle.parts()]
            elif axis is None:
                needed.append(RequiredRows(handle))
            else:
                rows = places if is_minibatch else all_rows[places.start : places.stop]
                needed.append(RequiredRows(handle, rows, axis))
        return needed

    def computation(self, state: RankState, replica: Replica) -> Callable[[Sequence[Any], int], Any]:
        """Return a function of prepared arguments and the number of rows, which computes the outputs."""
        if self.num_slices > 1:
            return functools.partial(compute_in_slices, self, state, replica)
        return functools.partial(self.execute, state, replica)

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
    counts = [shares(item, n_slices) for item in (n_rows, *by_rank)]
    for index, (own, *each) in enumerate(zip(*counts)):
        yield own, sum(each), [column.part(n_slices, index) for column in columns]


def distinct(values: Sequence[Any]) -> list[Any]:
    """Copy outputs that a subset names twice, so that the caller gets separate arrays."""
    return [
        value.copy()
        if value is not None and any([value is other for other in values[:position]])
        else value
        for position, value in enumerate(values)
    ]


# Outputs, as a rank sends them


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
    for index, mode, value in zip(indices, modes, values):
        if value is None and mode in OPERATIONS:
            raise ValueError(
                f"output {index} is None on rank {state.rank}, and cannot be reduced by {mode!r}: an "
                f"operation of its graph returns no array for some rows; have it return one for any "
                f"rows"
            )
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
            n_rows, *own = results[world.master_rank]
            if not n_rows:
                raise ValueError(
                    f"{function!r}: output {index} is the master's own value (op None), but the master "
                    f"had no rows (batch_s)"
                )
            outputs.append(own[len(outputs)])
        else:
            outputs.append(_of_ranks(world, function, index, values, weights, results))
    if subset is None and type(function.form) is bool:
        return outputs if function.form else outputs[0]
    return in_form(function, outputs, subset)


def in_form(function: Any, values: list[Any], subset: Sequence[int] | None) -> Any:
    """Return the outputs as the Theano function would: one, a list, or a dictionary."""
    form = function.form
    if form is True or (form is False and subset is not None):
        return values
    if form is False:
        return values[0]
    return dict(zip(form if subset is None else [form[index] for index in subset], values))


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
    replica, values = function.replica, [unpack(world.rank_state, value) for value in values]
    mode, shapes = replica.output_modes[index], [np.shape(value) for value in values]
    if mode == GATHER:
        axis = replica.output_axes[index]
        others = [shape[:axis] + shape[axis + 1 :] for shape in shapes]
        if any([other != others[0] for other in others]):
            raise ValueError(
                f"{function!r}: output {index} cannot be gathered, its shapes differ in more than axis "
                f"{axis}: {_listed(active, shapes)}"
            )
        return NUMPY.concatenate(values, axis).astype(replica.output_dtypes[index], copy=False)
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
    if active[0] == world.master_rank:
        values[0] = result = np.require(values[0], requirements=["C", "W"])
    else:
        result = np.empty(shapes[0], values[0].dtype)
    return operation.reduce_in_pieces(result, values, weights)


def _listed(active: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(f"rank {rank}: {shape}" for rank, shape in zip(active, shapes))
