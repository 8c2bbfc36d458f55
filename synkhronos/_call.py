"""What a rank does in the call of a function: take its rows, compute, hand the outputs over."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos._here import Command, Here
from synkhronos._operations import OPERATIONS, Accumulator
from synkhronos._partition import select, share
from synkhronos._references import open_reference
from synkhronos._typing import Reference, Rows

_SMALL = 4096  # bytes of an output that travels inside the reply


class CallFunction(Command):
    """One call of a replicated function.

    Parameters
    ----------
    number : int
        The function's.
    references : tuple
        Where each argument lies, the scattered ones first.
    rows : range, numpy.ndarray or None
        Rows of the whole data that the ranks share out among themselves.
    minibatch : tuple of bool
        For each scattered argument, whether it holds the rows of this batch only.
    batch_s : list or None
        By rank: the rows to use of the sliceable shared variables.
    num_slices : int
    subset : list of int or None
        Outputs to compute.
    """

    __slots__ = (
        "number",
        "references",
        "rows",
        "minibatch",
        "batch_s",
        "num_slices",
        "subset",
        "_prepared",
    )

    def __init__(
        self,
        number: int,
        references: tuple[Reference, ...],
        rows: Rows | None,
        minibatch: tuple[bool, ...],
        batch_s: list | None,
        num_slices: int,
        subset: list[int] | None,
    ) -> None:
        self.number = number
        self.references = references
        self.rows = rows
        self.minibatch = minibatch
        self.batch_s = batch_s
        self.num_slices = num_slices
        self.subset = subset
        self._prepared: Any = None  # this rank's arguments, if they are the same views each time

    def __reduce__(self):
        return CallFunction, (
            self.number,
            self.references,
            self.rows,
            self.minibatch,
            self.batch_s,
            self.num_slices,
            self.subset,
        )

    def run(self, here: Here) -> tuple[int, list | None]:
        """Return how many rows this rank had, and its outputs; None for these without rows."""
        function = here.functions[self.number]
        n_rows, arguments = self._prepared or self._prepare(here, function)
        here.rows[self.number] = n_rows
        if not n_rows:
            return 0, None
        if self.num_slices == 1:
            values = here.engine.call(function.compiled, arguments, self.subset)
            if self.subset is not None:
                values = _distinct(values)
        else:
            values = self._accumulate(here, function, arguments, n_rows)
        return n_rows, self._hand_over(here, function, values)

    def _prepare(self, here, function):
        """Return how many rows this rank has, and its arguments; columns, if it works in slices."""
        columns, n_rows = self._columns(here, function)
        if self.num_slices > 1 or not n_rows:
            return n_rows, columns
        arguments = [
            array if rows is None else here.take(key, array, rows) for key, array, rows in columns
        ]
        if not function.sliceable and type(self.rows) is not np.ndarray:
            self._prepared = n_rows, arguments
        return n_rows, arguments

    def _columns(self, here, function):
        """Return, for each argument, ``(key, array, rows of this rank)``; and how many rows these are.

        The rows of an argument that every rank and slice gets whole are None.
        """
        arrays = [open_reference(here, reference) for reference in self.references]
        n_rows = 1
        columns = []
        if self.rows is not None:
            start, stop = share(len(self.rows), here.size, here.rank)
            n_rows = stop - start
            rows = self.rows[start:stop]
            for position, minibatch in enumerate(self.minibatch):
                own = range(start, stop) if minibatch else rows
                columns.append(((self.number, position), arrays[position], own))
        columns.extend([(None, array, None) for array in arrays[len(columns) :]])
        if function.sliceable:
            batch = None if self.batch_s is None else self.batch_s[here.rank]
            for number in function.sliceable:
                array = here.engine.storage(here.shareds[number])
                own = select(batch, len(array), "batch_s")
                columns.append(((self.number, "shared", number), array, own))
            if self.rows is None:
                n_rows = max(len(rows) for _, _, rows in columns[-len(function.sliceable) :])
        return columns, n_rows

    def _accumulate(self, here, function, columns, n_rows):
        """Call the function slice by slice; every slice sees the old values of what it updates."""
        engine = here.engine
        updates = [(here.shareds[number], op) for number, op in function.updates]
        modes = function.output_modes
        if self.subset is not None:
            modes = [modes[index] for index in self.subset]
        outputs = [Accumulator(mode, engine.arithmetic) for mode in modes]
        news = [
            Accumulator(op, engine.arithmetic, f"the update of {shared}", "op None, to keep the last")
            for shared, op in updates
        ]
        olds = [engine.storage(shared) for shared, _ in updates]
        # No more than there are rows, also of the shortest of sliceable variables of unequal lengths.
        shortest = min([len(rows) for _, _, rows in columns if rows is not None])
        n_slices = min(self.num_slices, max(shortest, 1))
        try:
            for index in range(n_slices):
                start, stop = share(n_rows, n_slices, index)
                for (shared, _), old in zip(updates, olds):
                    if engine.reads(function.compiled, shared):
                        engine.store(shared, old.copy())  # an update may write in place
                arguments = [
                    array if rows is None else here.take(key, array, _slice(rows, n_slices, index))
                    for key, array, rows in columns
                ]
                values = engine.call(function.compiled, arguments, self.subset)
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
        dtypes = function.output_dtypes
        if self.subset is not None:
            dtypes = [dtypes[index] for index in self.subset]
        return [accumulator.result(dtype) for accumulator, dtype in zip(outputs, dtypes)]

    def _hand_over(self, here, function, values):
        """Return the outputs in the form in which they travel to the master."""
        modes = function.output_modes
        if self.subset is not None:
            modes = [modes[index] for index in self.subset]
        if here.comm.works_in_place and self._all_have_rows(here, function):
            values = self._reduce_in_place(here, modes, values)
        packed = []  # for a few, a comprehension takes longer
        for mode, value in zip(modes, values):
            packed.append(_pack(here, mode, value))
        return packed

    def _all_have_rows(self, here, function):
        """Whether every rank has rows, as far as each of them can tell by itself."""
        if self.rows is None:
            return not function.sliceable
        return len(self.rows) >= here.size

    def _reduce_in_place(self, here, modes, values):
        """Reduce what lies where the communicator reduces it; the other ranks then keep nothing."""
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


def _slice(rows, n_slices, index):
    start, stop = share(len(rows), n_slices, index)
    return rows[start:stop]


def _distinct(values):
    """Copy outputs that a subset names twice: each is its receiver's own."""
    return [
        value.copy() if any([value is earlier for earlier in values[:position]]) else value
        for position, value in enumerate(values)
    ]


def _pack(here, mode, value):
    """Return a float, a small array, or a reference to a large one."""
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
    """Return an output as the rank had it; a number, if it was one."""
    return here.memory.open(packed) if type(packed) is tuple else packed
