"""The part of each rank in a call: take its rows, compute, send the outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from synkhronos._typing import Compiled, Rows
from synkhronos.arithmetic.operations import OPERATIONS, Accumulator
from synkhronos.arithmetic.partition import select, share
from synkhronos.stores.handle import Handle
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
    sliceable : list of int
        The numbers of the sliceable shared variables.
    updates : list of (int, str or None)
        For each shared variable whose updates accumulate over slices: its number and the operation.
    """

    number: int
    compiled: Compiled
    output_modes: list[str | None]
    output_dtypes: list[np.dtype]
    sliceable: list[int]
    updates: list[tuple[int, str | None]]


class CallFunction(Command):
    """One call of a replicated function.

    Parameters
    ----------
    number : int
        The number of the function.
    handles : tuple of Handle
        A handle to each argument, the scattered ones first.
    rows : range, numpy.ndarray or None
        Rows of the whole data, to be divided among the ranks.
    minibatch : tuple of bool
        For each scattered argument, whether it holds the rows of this batch only.
    batch_s : list or None
        For each rank, the rows of the sliceable shared variables to use.
    num_slices : int
    subset : list of int or None
        Outputs to compute.
    """

    def __init__(
        self,
        number: int,
        handles: tuple[Handle, ...],
        rows: Rows | None,
        minibatch: tuple[bool, ...],
        batch_s: list | None,
        num_slices: int,
        subset: list[int] | None,
    ) -> None:
        self.number = number
        self.handles = handles
        self.rows = rows
        self.minibatch = minibatch
        self.batch_s = batch_s
        self.num_slices = num_slices
        self.subset = subset
        self._prepared: Any = None  # this rank's arguments, if every call uses the same views

    def __reduce__(self) -> tuple:
        return CallFunction, (
            self.number,
            self.handles,
            self.rows,
            self.minibatch,
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
        if self.num_slices == 1:
            values = here.engine.call(replica.compiled, arguments, self.subset)
            if self.subset is not None:
                values = _distinct(values)
        else:
            values = self._accumulate(here, replica, arguments, n_rows)
        return n_rows, self._send(here, replica, values)

    def _prepare(self, here, replica):
        """Return the number of rows of this rank, and its arguments, or columns if there are slices."""
        columns, n_rows = self._columns(here, replica)
        if self.num_slices > 1 or not n_rows:
            return n_rows, columns
        arguments = [_argument(here, *column) for column in columns]
        if not replica.sliceable and type(self.rows) is not np.ndarray and here.store.is_shared:
            self._prepared = n_rows, arguments
        return n_rows, arguments

    def _columns(self, here, replica):
        """Return ``(key, source, rows of this rank)`` for each argument, and the number of rows.

        A source is an array or a handle. For an argument that is used as a whole, rows is None.
        """
        n_rows = 1
        columns = []
        if self.rows is not None:
            start, stop = share(len(self.rows), here.size, here.rank)
            n_rows = stop - start
            rows = self.rows[start:stop]
            for position, minibatch in enumerate(self.minibatch):
                own = range(start, stop) if minibatch else rows
                columns.append(((self.number, position), self.handles[position], own))
        whole = self.handles[len(columns) :]
        columns.extend([(None, here.store.get(handle), None) for handle in whole])
        if replica.sliceable:
            batch = None if self.batch_s is None else self.batch_s[here.rank]
            for number in replica.sliceable:
                array = here.engine.storage(here.shareds[number])
                own = select(batch, len(array), "batch_s")
                columns.append(((self.number, "shared", number), array, own))
            if self.rows is None:
                n_rows = max(len(rows) for _, _, rows in columns[-len(replica.sliceable) :])
        return columns, n_rows

    def _accumulate(self, here, replica, columns, n_rows):
        """Call the function once per slice; every slice reads the old values of updated variables."""
        engine = here.engine
        updates = [(here.shareds[number], op) for number, op in replica.updates]
        outputs = [Accumulator(mode, engine.arithmetic) for mode in self._chosen(replica.output_modes)]
        news = [
            Accumulator(op, engine.arithmetic, f"the update of {shared}", "op None, to keep the last")
            for shared, op in updates
        ]
        olds = [engine.storage(shared) for shared, _ in updates]
        # No more slices than rows; if sliceable variables differ in length, the shortest counts.
        shortest = min([len(rows) for _, _, rows in columns if rows is not None])
        n_slices = min(self.num_slices, max(shortest, 1))
        try:
            for index in range(n_slices):
                start, stop = share(n_rows, n_slices, index)
                for (shared, _), old in zip(updates, olds):
                    if engine.reads(replica.compiled, shared):
                        engine.store(shared, old.copy())  # an update may write in place
                arguments = [
                    _argument(here, key, source, _slice(rows, n_slices, index))
                    for key, source, rows in columns
                ]
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
            return not replica.sliceable
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


def _argument(here, key, source, rows):
    """Return an argument of the compiled function: all of an array, or rows of it."""
    return source if rows is None else here.take(key, source, rows)


def _slice(rows, n_slices, index):
    if rows is None:
        return None
    start, stop = share(len(rows), n_slices, index)
    return rows[start:stop]


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
