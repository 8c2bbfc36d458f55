"""The part of each rank in a call: take its rows, compute, send the outputs."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Hashable, Sequence, Tuple, Union

import numpy as np

from synkhronos._typing import Array, Batch, Compiled, Rows
from synkhronos.arithmetic.conversion import usable
from synkhronos.arithmetic.partition import select, share
from synkhronos.functions.hardcoded_rows import check_all_are_used, explained
from synkhronos.functions.outputs import pack, reduce_in_place
from synkhronos.functions.peers import GraphPeers
from synkhronos.functions.replica import Replica, on_copies
from synkhronos.functions.rows import (
    NO_LIMIT,
    Bound,
    Column,
    RowLimit,
    Split,
    compute_in_slices,
    distinct,
)
from synkhronos.host.status import ROWS
from synkhronos.stores.handle import Composite, Handle, RequiredRows
from synkhronos.world.rank_state import Command, RankState

if TYPE_CHECKING:
    from synkhronos.engines.base import Engine
    from synkhronos.functions.window import Window

#: Computes the outputs of this rank
_Compute = Callable[[], Sequence[Any]]
#: A range of rows as a tuple, an array of rows, or None for the same rows
_Change = Union[Tuple[int, int, int], np.ndarray, None]


@dataclasses.dataclass(eq=False, repr=False)
class CallFunction(Command):
    """One call of a replicated function.

    Parameters
    ----------
    number : int
        The number of the function.
    handles : tuple of Handle or Composite
        The arguments.
    splits : list of (Split or None), or None
        How each argument is split; None for an argument that every rank uses as a whole, or instead of
        the list if no argument is split.
    rows : range, numpy.ndarray or None
        Rows of the whole data, to be divided among the ranks.
    batch_s : list or None
        For each rank, the rows of the sliceable shared variables to use.
    num_slices : int
        The number of slices in which each rank computes.
    subset : list of int or None
        Outputs to compute.
    most : RowLimit, optional
        A limit for rows whose number only the ranks know.
    """

    number: int
    handles: tuple[Handle | Composite, ...]
    splits: list[Split | None] | None
    rows: Rows | None
    batch_s: list[Batch | None] | None
    num_slices: int
    subset: list[int] | None
    most: RowLimit = NO_LIMIT

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
        handle: Any  # no composite object is split
        for handle, split in zip(self.handles, self.splits or ()):
            if split is not None:
                if split.minibatch:
                    return None
                length = handle.shape[split.axis]
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

    def on_few(self, most: RowLimit) -> CallFunction:
        """Return the same call on some of its rows, evenly spaced if their number is known."""
        rows, n_rows = self.rows, most.together
        if rows is not None and n_rows is not None and len(rows) > n_rows:
            step = len(rows) // n_rows
            rows = rows[: n_rows * step : step]
        return dataclasses.replace(self, rows=rows, most=most)

    def run(self, state: RankState) -> Sequence[Any]:
        """Return the number of rows of this rank, followed by its outputs if there are rows."""
        replica = state.functions[self.number]
        return self._finish(state, replica, *self._prepare(state, replica, self.rows))

    def _finish(
        self, state: RankState, replica: Replica, n_all: int | None, n_rows: int, compute: _Compute
    ) -> tuple[Any, ...]:
        state.rows[self.number] = n_rows
        if n_all is not None or replica.sliceable:  # otherwise each rank counts as having one row
            state.progress[ROWS] += n_rows
        if not n_rows and not replica.has_collectives:
            return (0,)
        try:
            values = compute()
        except Exception as error:
            better = explained(error, replica, n_all, self._at_once(n_rows))
            if better is None:
                raise
            raise better from error
        return (n_rows, *self._send(state, replica, values, n_all)) if n_rows else (0,)

    def has_rows(self, replica: Replica) -> bool:
        """Whether it is about rows; otherwise each rank counts as having one."""
        return self.rows is not None or bool(replica.sliceable) or replica.window is not None

    def bind(self, state: RankState) -> Callable[[_Change], Sequence[Any]]:
        replica = state.functions[self.number]
        unchanged, epoch = None, None  # what was prepared for the same rows, and the epoch of the store

        def run(change: _Change) -> Sequence[Any]:
            nonlocal unchanged, epoch
            if change is not None:
                prepared = self._prepare(state, replica, _rows_of(change))
            elif epoch is not None and epoch == state.store.epoch:
                prepared = unchanged
            else:
                prepared = unchanged = self._prepare(state, replica, self.rows)
                epoch = state.store.epoch if self._is_constant(state, replica) else None
            return self._finish(state, replica, *prepared)

        return run

    def warm_caches(self, state: RankState, change: _Change = None) -> None:
        call, replica = self.changed(change), state.functions[self.number]
        if call.num_slices == 1 and call._is_constant(state, replica):
            call._prepare(state, replica, call.rows)

    def needs(self, ranks: range, size: int) -> list[RequiredRows]:
        all_rows: Any = self.rows  # not None if an argument is split by them
        if all_rows is not None:
            start, _ = share(len(all_rows), size, ranks[0])
            _, stop = share(len(all_rows), size, ranks[-1])
            start = min(start, stop - 1)  # see `_columns`
        needed = []
        for handle, split in zip(self.handles, self.splits or [None] * len(self.handles)):
            if isinstance(handle, Composite):
                needed += [RequiredRows(part) for part in handle.parts()]
            elif split is None:
                needed.append(RequiredRows(handle))
            else:
                rows = range(start, stop) if split.minibatch else all_rows[start:stop]
                needed.append(RequiredRows(handle, rows, split.axis))
        return needed

    def _compute(
        self, state: RankState, replica: Replica, arguments: list[Any], n_rows: int
    ) -> list[Any]:
        """Return the outputs for this rank's arguments, or columns if there are slices."""
        if self.num_slices > 1:
            return compute_in_slices(self, state, replica, arguments, n_rows)
        values = self.execute(state, replica, arguments, n_rows)
        return values if self.subset is None else distinct(values)

    def execute(
        self, state: RankState, replica: Replica, arguments: list[Any], n_rows: int
    ) -> list[Any]:
        """Call the compiled function once, with the other ranks if there are collectives in it."""
        if state.overlap is not None:
            state.overlap.forget()
        if not replica.has_collectives:
            return state.engine.call(replica.compiled, arguments, self.subset)
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

    def _whole(self, state: RankState, handle: Handle) -> np.ndarray:
        return state.store.get(handle)

    def _share(self, state: RankState, n_rows: int) -> tuple[int, range]:
        """Return the number of rows of this rank, and their places, or that of the last row."""
        start, stop = share(n_rows, state.size, state.rank)
        return stop - start, range(min(start, max(stop - 1, 0)), stop)

    def _batch_s(self, state: RankState) -> Batch | None:
        """Return the rows of this rank's sliceable shared variables to use."""
        return None if self.batch_s is None else self.batch_s[state.rank]

    def title(self, state: RankState) -> str:
        name = getattr(state.functions[self.number].compiled, "name", None) or ""
        return f"function {os.path.basename(name)}"

    def describe(self, state: RankState) -> str:
        return f"{self.title(state)}, {state.rows.get(self.number, 0)} row(s) of this rank"

    def _prepare(
        self, state: RankState, replica: Replica, rows: Rows | None
    ) -> tuple[int | None, int, _Compute]:
        """Return the numbers of rows of all ranks, if known, and of this one, and the computation."""
        n_all, n_rows, columns = self._columns(state, replica, rows)
        if self.num_slices > 1 or not (n_rows or replica.has_collectives):
            return n_all, n_rows, partial(self._compute, state, replica, columns, n_rows)
        arguments = [column.take(state) for column in columns]
        if replica.has_collectives or state.overlap is not None or self.subset is not None:
            return n_all, n_rows, partial(self._compute, state, replica, arguments, n_rows)
        return n_all, n_rows, partial(_call, state.engine, replica.compiled, arguments)

    def _is_constant(self, state: RankState, replica: Replica) -> bool:
        """Whether the arguments are the same views whenever this command is repeated."""
        if state.store.epoch is None or replica.sliceable or replica.window is not None:
            return False
        if type(self.rows) is np.ndarray:
            return False
        return not any([isinstance(handle, Composite) for handle in self.handles])

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
        for position, handle in enumerate(self.handles):
            split = None if self.splits is None else self.splits[position]
            if split is not None:
                taken = places if split.minibatch else own
                columns.append(Column(handle, taken, split.axis, (self.number, position)))
            elif isinstance(handle, Composite):
                columns.append(Column(handle.open(state.store)))
            else:
                columns.append(Column(self._whole(state, handle)))
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
        array = usable(state.engine.storage(state.shareds[number]))
        own = select(self._batch_s(state), len(array), "batch_s")[: self.most.by_rank]
        return Column(array, own, 0, (self.number, "shared", number))

    def _length(
        self, state: RankState, window: Window, columns: Sequence[Column], n_rows: int | None
    ) -> int:
        """Return the number of rows of all ranks in the window, which is that of the inputs."""
        arguments = [column.source for column in columns]
        if self.most.together is None:
            return window.length(state.engine, arguments, n_rows)
        return min(window.length(state.engine, arguments), self.most.together)

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


def _call(engine: Engine, compiled: Compiled, arguments: Sequence[Any]) -> list[Array]:
    return engine.call(compiled, arguments)
