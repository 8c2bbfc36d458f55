"""The part of each rank in a call: take its rows, compute, send the outputs."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, Sequence

import numpy as np

from synkhronos._typing import Compiled, Rows
from synkhronos.arithmetic.operations import OPERATIONS, Accumulator
from synkhronos.arithmetic.partition import select, share
from synkhronos.engines.base import Engine
from synkhronos.stores.handle import Composite, Handle
from synkhronos.stores.needs import Need
from synkhronos.world.here import Command, Here

_SMALL = 4096  # bytes; outputs up to this size are part of the reply


class Replica(NamedTuple):
    """A rank's replica of a function.

    Attributes
    ----------
    number : int
        The number by which all ranks know the function.
    compiled : compiled function
    output_modes : list of str or None
        How each output is reduced.
    output_dtypes : list of numpy.dtype
    output_axes : list of int
        The axis along which each output is gathered.
    lengths : compiled function or None
        If the function takes a window of rows by an index: of the same arguments, it computes the
        numbers of rows in the window, which must be equal.
    sliceable : list of int
        The numbers of the sliceable shared variables.
    updates : list of (int, str or None)
        For each shared variable whose updates accumulate over slices: its number and the operation.
    """

    number: int
    compiled: Compiled
    output_modes: list[str | None]
    output_dtypes: list[np.dtype]
    output_axes: list[int]
    lengths: Compiled | None
    sliceable: list[int]
    updates: list[tuple[int, str | None]]


class Split(NamedTuple):
    """How an argument is split over the ranks.

    Attributes
    ----------
    axis : int
    minibatch : bool
        Whether the argument holds the rows of this batch only.
    """

    axis: int
    minibatch: bool


class CallFunction(Command):
    """One call of a replicated function.

    Parameters
    ----------
    number : int
        The number of the function.
    handles : tuple of Handle or Composite
        A handle to each argument.
    splits : list of (Split or None), or None
        How each argument is split; None for an argument that every rank uses as a whole, and instead
        of the list if these are all.
    rows : range, numpy.ndarray or None
        Rows of the whole data, to be divided among the ranks.
    batch_s : list or None
        For each rank, the rows of the sliceable shared variables to use.
    num_slices : int
    subset : list of int or None
        Outputs to compute.
    """

    def __init__(
        self,
        number: int,
        handles: tuple[Handle | Composite, ...],
        splits: list[Split | None] | None,
        rows: Rows | None,
        batch_s: list | None,
        num_slices: int,
        subset: list[int] | None,
    ) -> None:
        self.number = number
        self.handles = handles
        self.splits = splits
        self.rows = rows
        self.batch_s = batch_s
        self.num_slices = num_slices
        self.subset = subset
        self._prepared: Any = None  # this rank's arguments, if every call uses the same views

    def __reduce__(self) -> tuple:
        return CallFunction, (
            self.number,
            self.handles,
            self.splits,
            self.rows,
            self.batch_s,
            self.num_slices,
            self.subset,
        )

    def run(self, here: Here) -> tuple[int, list | None]:
        """Return the number of rows of this rank, and its outputs, which are None without rows."""
        replica = here.functions[self.number]
        n_rows, arguments = self._prepared or self._prepare(here, replica)
        here.rows[self.number] = n_rows
        if not n_rows:
            return 0, None
        values = self._compute(here, replica, arguments, n_rows)
        return n_rows, self._send(here, replica, values)

    def needs(self, ranks: range, size: int) -> list[Need]:
        if self.rows is not None:
            start, _ = share(len(self.rows), size, ranks[0])
            _, stop = share(len(self.rows), size, ranks[-1])
        needed = []
        for handle, split in zip(self.handles, self.splits or [None] * len(self.handles)):
            if isinstance(handle, Composite):
                needed += [Need(one) for one in handle.parts()]
            elif split is None:
                needed.append(Need(handle))
            else:
                rows = range(start, stop) if split.minibatch else self.rows[start:stop]
                needed.append(Need(handle, rows, split.axis))
        return needed

    def _compute(self, here, replica, arguments, n_rows):
        """Return the outputs for this rank's arguments, or columns if there are slices."""
        if self.num_slices > 1:
            return self._accumulate(here, replica, arguments, n_rows)
        values = here.engine.call(replica.compiled, arguments, self.subset)
        return values if self.subset is None else _distinct(values)

    def _whole(self, here, handle):
        return here.store.get(handle)

    def _share(self, here, n_rows):
        """Return the first row of this rank, and the row after the last."""
        return share(n_rows, here.size, here.rank)

    def _batch_s(self, here):
        """Return the rows of this rank's sliceable shared variables to use."""
        return None if self.batch_s is None else self.batch_s[here.rank]

    def describe(self, here: Here) -> str:
        name = getattr(here.functions[self.number].compiled, "name", None) or ""
        return f"function {os.path.basename(name)}, {here.rows.get(self.number, 0)} row(s) of this rank"

    def _prepare(self, here, replica):
        """Return the number of rows of this rank, and its arguments, or columns if there are slices."""
        columns, n_rows = self._columns(here, replica)
        if self.num_slices > 1 or not n_rows:
            return n_rows, columns
        arguments = [column.take(here) for column in columns]
        if self._is_constant(replica) and here.store.is_shared:
            self._prepared = n_rows, arguments
        return n_rows, arguments

    def _is_constant(self, replica):
        """Whether the arguments are the same views whenever this command is repeated."""
        if replica.sliceable or replica.lengths is not None or type(self.rows) is np.ndarray:
            return False
        return not any([isinstance(handle, Composite) for handle in self.handles])

    def _columns(self, here, replica):
        """Return a `_Column` for each argument, and the number of rows of this rank."""
        n_rows, rows = 1, None
        if self.rows is not None:
            start, stop = self._share(here, len(self.rows))
            n_rows, rows = stop - start, self.rows[start:stop]
        columns = []
        for position, handle in enumerate(self.handles):
            split = None if self.splits is None else self.splits[position]
            if split is not None:
                own = range(start, stop) if split.minibatch else rows
                columns.append(_Column(handle, own, split.axis, (self.number, position)))
            elif isinstance(handle, Composite):
                columns.append(_Column(handle.open(here.store)))
            else:
                columns.append(_Column(self._whole(here, handle)))
        if replica.lengths is not None:
            n_rows, bounds = self._window(here, replica, [column.source for column in columns])
            columns.extend(bounds)
        if replica.sliceable:
            batch = self._batch_s(here)
            for number in replica.sliceable:
                array = here.engine.storage(here.shareds[number])
                own = select(batch, len(array), "batch_s")
                columns.append(_Column(array, own, 0, (self.number, "shared", number)))
            if self.rows is None and replica.lengths is None:
                n_rows = max(len(column.rows) for column in columns[-len(replica.sliceable) :])
        return columns, n_rows

    def _window(self, here, replica, arguments):
        """Return the number of rows of this rank in the window, and the columns of its bounds."""
        lengths = [int(one) for one in here.engine.call(replica.lengths, arguments)]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"givens: expected slices of the same number of rows, got {lengths}; the ranks share "
                f"the rows of each slice"
            )
        start, stop = self._share(here, lengths[0])
        rows = range(start, stop)
        return len(rows), [_Bound(rows, 0), _Bound(rows, 1)]

    def _accumulate(self, here, replica, columns, n_rows):
        """Call the function once per slice; every slice reads the old values of updated variables."""
        engine = here.engine
        updates = [(here.shareds[number], op) for number, op in replica.updates]
        outputs = [
            Accumulator(mode, engine.arithmetic, axis=axis)
            for mode, axis in self._chosen([*zip(replica.output_modes, replica.output_axes)])
        ]
        news = [
            Accumulator(op, engine.arithmetic, f"the update of {shared}", "op None, to keep the last")
            for shared, op in updates
        ]
        olds = [engine.storage(shared) for shared, _ in updates]
        # No more slices than rows; if sliceable variables differ in length, the shortest counts.
        shortest = min([len(column.rows) for column in columns if column.rows is not None])
        n_slices = min(self.num_slices, max(shortest, 1))
        try:
            for index in range(n_slices):
                start, stop = share(n_rows, n_slices, index)
                for (shared, _), old in zip(updates, olds):
                    if engine.reads(replica.compiled, shared):
                        engine.store(shared, old.copy())  # an update may write in place
                arguments = [column.slice(n_slices, index).take(here) for column in columns]
                values = engine.call(replica.compiled, arguments, self.subset)
                for accumulator, value in zip(outputs, _distinct(values)):
                    accumulator.add(value, stop - start)
                for accumulator, (shared, _) in zip(news, updates):
                    accumulator.add(engine.storage(shared), stop - start)
        finally:
            for (shared, _), old in zip(updates, olds):
                engine.store(shared, old)
        for accumulator, (shared, _), old in zip(news, updates, olds):
            new = accumulator.result(old.dtype)
            if new.shape == old.shape and old.flags.writeable:
                old[...] = new
            else:
                engine.store(shared, new)
        dtypes = self._chosen(replica.output_dtypes)
        return [accumulator.result(dtype) for accumulator, dtype in zip(outputs, dtypes)]

    def _send(self, here, replica, values):
        """Return the outputs in the form in which they are sent to the master."""
        modes = self._chosen(replica.output_modes)
        if here.comm.reduces_in_place and self._all_have_rows(here, replica):
            values = self._reduce_in_place(here, modes, values)
        packed = []  # faster than a comprehension for a few items
        for mode, value in zip(modes, values):
            packed.append(_pack(here, mode, value))
        return packed

    def _chosen(self, items):
        """Return the items of the outputs that are computed."""
        return items if self.subset is None else [items[index] for index in self.subset]

    def _all_have_rows(self, here, replica):
        """Whether it is certain, without communication, that every rank has rows."""
        if self.rows is None:
            return not replica.sliceable and replica.lengths is None
        return len(self.rows) >= here.size

    def _reduce_in_place(self, here, modes, values):
        """Reduce the values that the communicator supports; only the master keeps the results."""
        values = list(values)
        for op in OPERATIONS:
            chosen = [
                position
                for position, (mode, value) in enumerate(zip(modes, values))
                if mode == op and here.comm.takes(value)
            ]
            if chosen:
                arrays = [values[position] for position in chosen]
                n_rows = here.rows[self.number]
                reduced = here.comm.reduce(arrays, op, here.master_rank, n_rows)
                for position, value in zip(chosen, reduced):
                    values[position] = value if here.is_master else None
        return values


class _Column(NamedTuple):
    """An argument, or the part of it that this rank uses.

    Attributes
    ----------
    source : array, Handle, Composite, or any object that is used as a whole
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

    def slice(self, n_slices: int, index: int) -> _Column:
        """Return a slice of the rows."""
        if self.rows is None:
            return self
        start, stop = share(len(self.rows), n_slices, index)
        return self._replace(rows=self.rows[start:stop])

    def take(self, here: Here) -> Any:
        """Return the argument of the compiled function."""
        if self.rows is None:
            return self.source
        return here.take(self.key, self.source, self.rows, self.axis)


class _Bound(NamedTuple):
    """An argument that is one bound of this rank's rows: the first row, or the row after the last."""

    rows: range
    end: int

    def slice(self, n_slices: int, index: int) -> _Bound:
        start, stop = share(len(self.rows), n_slices, index)
        return self._replace(rows=self.rows[start:stop])

    def take(self, here: Here) -> np.ndarray:
        return np.array(self.rows.stop if self.end else self.rows.start)


def bounds_of_all_rows(engine: Engine, replica: Replica, inputs: Sequence[Any]) -> list[np.ndarray]:
    """Return the arguments with which a function uses all rows of its window, if it has one."""
    if replica.lengths is None:
        return []
    return [np.array(0), np.array(min(int(one) for one in engine.call(replica.lengths, inputs)))]


def _distinct(values):
    """Copy outputs that a subset names twice, so that the caller gets separate arrays."""
    return [
        value.copy() if any([value is earlier for earlier in values[:position]]) else value
        for position, value in enumerate(values)
    ]


def _pack(here, mode, value):
    """Return a float, a small array, or a handle to a large one."""
    if mode is None:
        return here.engine.to_host(value) if here.is_master else None
    if value is None:
        return None
    if value.ndim == 0 and value.dtype.kind == "f":
        return value.item()
    if here.is_master or value.size * value.dtype.itemsize <= _SMALL:
        return here.engine.to_host(value)
    return here.send(value)


def unpack(here: Here, packed: Any) -> Any:
    """Return an output as the rank computed it: an array or a number."""
    return here.store.get(packed) if isinstance(packed, Handle) else packed
