"""Evaluations without Python: the workers stay in a loop of `native`, and Numba code asks for sums.

A sum has a record in memory that is never freed, so code that Numba has compiled can look at any time
whether it can be evaluated without Python. It can after the first evaluations, which are compared, and
until another command of the world, for which the workers leave the loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import time
import weakref
from typing import Any, Callable, Sequence

import numpy as np

import synkhronos as synk
from synkhronos._typing import AnyArray
from synkhronos.extensions.pymc import native
from synkhronos.extensions.pymc.compiled import Layout, hash_of, is_compiled_by_numba, n_bytes_of
from synkhronos.extensions.pymc.lost_errors import log
from synkhronos.functions.steps import World, compiled_of, stay, world_to_stay

_LARGE = 1 << 16  # bytes of rows of a rank; with fewer, one process computes all rows at once
_LATE = 0.2  # seconds, as in `native`
_NAP = 1e-3

_logger = logging.getLogger("synkhronos")
_libc = ctypes.CDLL(None)


class Residence:
    """The workers of a world in the loop, and the sums that are evaluated there."""

    def __init__(self) -> None:
        self._sums: weakref.WeakSet[ResidentSum] = weakref.WeakSet()
        self.common = _memory(native.COMMON_BYTES)
        _libc.pthread_mutex_init(ctypes.c_void_p(self.common + native.MUTEX), None)
        os.register_at_fork(after_in_child=functools.partial(_switch_off, weakref.ref(self._sums)))
        self._board: AnyArray | None = None
        self._world: World | None = None

    def begin(self, world: World, new: ResidentSum) -> None:
        """Have the workers enter the loop, with all sums that are ready."""
        self._sums.add(new)
        self._world = world
        size, own = world.size, world.master_rank
        before = self._board  # until the workers have left it
        memory = synk.data(np.zeros(native.LINE * (1 + size), np.uint8))
        self._board = np.asarray(memory)
        board = self._board.ctypes.data
        for rank in range(size):
            place = board + native.LINE * (1 + rank) + native.SEMAPHORE
            _libc.sem_init(ctypes.c_void_p(place), 1, 0)
        write(board + native.NUMBER, 1)  # which the workers have finished when they are ready
        sums = list(self._sums)
        for index, item in enumerate(sums):
            item.settle(self.common, index, size)
        common = {
            native.BOARD: board,
            native.SIZE: size,
            native.RANK: own,
            native.POLLS: len(os.sched_getaffinity(0)) >= size,
            native.HALVINGS: 0,
            native.STARTED: 0,
        }
        if size > 1:
            for place, value in common.items():
                write(self.common + place, value)
            uses = [(item.function, [*item.data, item.box, memory]) for item in sums]
            layouts = [item.layout for item in sums]
            stay(world, serve, uses, (layouts, size, own, common[native.POLLS]), self.leave)
        if not all([item.compile() for item in sums]):  # which the workers do at the same time
            return
        if size > 1:
            waited = 0.0
            while native.wait_for_ranks(self.common, 0):
                waited += _LATE
                world.check_waiting(waited)
        del before
        if self._has_failed():
            new.is_impossible = True
            return
        for item in sums:
            item.set_on(True)

    def leave(self) -> None:
        """Have the workers leave the loop. No evaluation begins any more."""
        while native.lock(self.common):  # another thread evaluates
            pass
        for item in self._sums:
            item.set_on(False)
        native.unlock(self.common)
        board, world = self._board, self._world
        if board is not None and world is not None:
            place = board.ctypes.data
            write(place + native.SUM, native.NONE)
            write(place + native.NUMBER, read(place + native.NUMBER) + 1)
            native.wake(place, world.size, world.master_rank)

    def check(self, waited: float) -> None:
        """Raise if it is useless to wait longer for an evaluation."""
        if self._world is not None:
            self._world.check_waiting(waited)
        if self._has_failed():  # they have left the loop; the next command gets their errors
            for item in self._sums:
                item.set_on(False)

    def _has_failed(self) -> bool:
        if self._board is None:
            return False
        lines = self._board.view(np.int64).reshape(-1, native.LINE // 8)[1:]
        return bool(lines[:, native.GONE // 8].any())

    def close(self) -> None:
        """Free the memory, when no thread uses it any more."""
        self.leave()
        for item in self._sums:
            item.free()
        self._board = None

    renew = leave


class ResidentSum:
    """A sum over rows that can be evaluated without Python.

    Parameters
    ----------
    name : str
        Its name in messages.
    n_slices : int
        In how many slices all ranks together compute the rows.

    Attributes
    ----------
    record : int
        The address of its record.
    is_impossible : bool
        Whether it cannot be, as Numba does not compile it or the ranks do not share their memory.
    """

    def __init__(self, name: str, n_slices: int) -> None:
        self.record = _memory(native.RECORD_BYTES)
        self._name, self._n_slices = name, n_slices
        self.is_impossible = False
        self._residence: Any = None
        self.layout: Any = None  # a `Layout` once it has begun
        self.box: Any = None
        self.data: list[Any] = []

    def begin(
        self, function: synk.Function, data: Sequence[Any], values: Sequence[AnyArray], n_outputs: int
    ) -> None:
        """Make evaluations with parameters of these shapes possible, if they are.

        Parameters
        ----------
        function : Function
            Returns the vector of outputs, for rows and parameters.
        data : list of Data
            The rows.
        values : list of array
            The parameters.
        n_outputs : int
            The number of outputs.
        """
        world = world_to_stay(function)
        if world is not None and self._take(function, data, values, n_outputs, world.size):
            self._residence = world.part(Residence)
            self._residence.begin(world, self)

    def begin_alone(
        self, function: synk.Function, data: Sequence[Any], values: Sequence[AnyArray], n_outputs: int
    ) -> None:
        """The same for a rank that computes all rows, in a program."""
        if self._take(function, data, values, n_outputs, 1):
            common = _memory(native.COMMON_BYTES)
            write(common + native.SIZE, 1)
            self.settle(common, 0, 1)
            self.set_on(self.compile())

    def _take(
        self, function: synk.Function, data: Sequence[Any], values: Any, n_outputs: int, size: int
    ) -> bool:
        """Take what is to be evaluated; return whether Numba can."""
        self._wait_for_others()
        rows, compiled = [np.asarray(array) for array in data], compiled_of(function)
        usable = all(row.flags.c_contiguous and row.flags.aligned for row in rows)
        self.is_impossible = not usable or not is_compiled_by_numba(compiled)
        layout = Layout(
            tuple((value.shape, value.dtype.name) for value in values), n_outputs, self._n_slices
        )
        is_other = layout != self.layout or any(array is not old for array, old in zip(data, self.data))
        if is_other and not self.is_impossible:
            box = np.zeros(layout.start + size * layout.stride, np.uint8)
            self.layout, self.box = layout, box if size == 1 else synk.data(box)
            self.function, self.data, self._rows = function, list(data), rows
        return not self.is_impossible

    def settle(self, common: int, index: int, size: int) -> None:
        """Write the record, for one of the sums of a number of ranks."""
        self._wait_for_others()
        layout, box = self.layout, np.asarray(self.box).ctypes.data
        tables = [layout.table(self._rows, box, rank, size) for rank in range(size)]
        tables.append(layout.table(self._rows, box, 0, 1))
        self._tables = np.stack(tables)
        together = size == 1 or sum(row.nbytes for row in self._rows) < _LARGE * size
        record = {
            native.COMMON: common,
            native.INDEX: index,
            native.TABLES: self._tables.ctypes.data,
            native.TABLE_BYTES: self._tables[0].nbytes,
            native.N_TABLES: 1 if together else size,
            native.PARAMETERS: box,
            native.N_BYTES: layout.n_bytes,
            native.OUTPUTS: box + layout.start,
            native.STRIDE: layout.stride,
            native.N_OUTPUTS: layout.n_outputs,
            native.SHAPES: hash_of([shape for shape, _ in layout.parameters]),
            native.COUNT: 0,
            native.TOTAL: 0,
        }
        if size == 1:
            record[native.CHOICE] = native.ONLY_ALONE
        for place, value in record.items():
            write(self.record + place, value)

    def compile(self) -> bool:
        """Compile the part of this process; return whether Numba can do that."""
        try:
            part = self.layout.part(compiled_of(self.function), self._rows)
        except Exception as error:  # Numba raises many kinds of them
            _logger.info("%s: Python takes part in evaluations: %s", self._name, error)
            self.is_impossible = True
            return False
        write(self.record + native.PART, part)
        return True

    def set_on(self, is_on: bool) -> None:
        """Let Numba code evaluate it, or not."""
        write(self.record + native.IS_ON, int(is_on))

    def evaluate(self, values: Sequence[AnyArray]) -> AnyArray | None:
        """Return the outputs for parameters; None if this is not possible now."""
        layout = self.layout
        if layout is None or not read(self.record + native.IS_ON):
            return None
        if tuple((variable.shape, variable.dtype.name) for variable in values) != layout.parameters:
            return None
        packed, place = np.empty(layout.n_bytes // 8, np.int64), 0
        for value, parameter in zip(values, layout.parameters):
            packed.view(np.uint8)[place : place + value.nbytes] = value.reshape(-1).view(np.uint8)
            place += n_bytes_of(*parameter)
        outputs, waited = np.empty(layout.n_outputs), 0.0
        evaluate = native.function("evaluate").ctypes
        while True:
            places = packed.ctypes.data, packed.nbytes, outputs.ctypes.data, outputs.size
            code = evaluate(self.record, *places)
            if code == native.DONE:
                return outputs
            if code == native.SAY:
                self._say()
            elif code == native.LATE:
                waited += _LATE
                self._residence.check(waited)
            else:
                return None

    def _say(self) -> None:
        alone, ranks = (read(self.record + place) / 1e6 for place in (native.ALONE, native.WITH_RANKS))
        log(
            logging.WARNING,
            f"{self._name}: an evaluation takes {alone:.2g} ms on one process and {ranks:.2g} ms on "
            f"{synk.size()} ranks, so the script's process computes alone, and tries again now and then",
        )

    def free(self) -> None:
        """Free its memory, when no thread uses it any more."""
        self._wait_for_others()
        self.layout = self.box = None
        self.data, self._rows = [], []

    def _wait_for_others(self) -> None:
        self.set_on(False)
        while read(self.record + native.BUSY):
            time.sleep(_NAP)

    def __del__(self) -> None:
        self.set_on(False)


def serve(
    rank: int,
    check: Callable[[], None],
    uses: Sequence[tuple[Any, list[AnyArray]]],
    layouts: Sequence[Layout],
    size: int,
    master: int,
    polls: int,
) -> None:
    """Compute this worker's part of sums until it has to leave; see `stay`.

    Parameters
    ----------
    uses : list of (compiled function, list of array)
        For each sum, its function, its rows, its parameters and outputs, and the board.
    layouts : list of Layout
        Of each sum.
    """
    board = uses[0][1][-1].ctypes.data
    line = board + native.LINE * (1 + rank)
    try:
        parts, tables = [], []
        for (compiled, (*rows, box, _)), layout in zip(uses, layouts):
            parts.append(layout.part(compiled, rows))
            tables.append(layout.table(rows, box.ctypes.data, rank, size))
        loop = native.function("serve").ctypes  # compiled before this worker is ready
        words = [parts, [table.ctypes.data for table in tables], [0]]
        addresses = [np.array(word, np.int64) for word in words]
        write(line + native.FINISHED, read(board + native.NUMBER))
        places = [address.ctypes.data for address in addresses]
        code = native.LATE
        while code != native.LEFT:
            code = loop(board, size, rank, master, polls, *places)
            if code == native.LATE:
                check()
            elif code == native.CROWDED:
                _leave_core(read(board + native.LINE * (1 + master) + native.CORE))
    finally:
        write(line + native.GONE, 1)
        write(line + native.FINISHED, read(board + native.NUMBER))


def _leave_core(number: int) -> None:
    """Move this thread to another core; see `transports.waiting`."""
    allowed = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # cores were just taken away
        os.sched_setaffinity(0, allowed - {number} or allowed)
        os.sched_setaffinity(0, allowed)


def _switch_off(reference: weakref.ref[weakref.WeakSet[ResidentSum]]) -> None:
    """In a process that was forked from this one: the ranks are those of this one."""
    for item in reference() or ():
        item.set_on(False)


def read(address: int) -> int:
    """Return the word at an address."""
    return ctypes.c_int64.from_address(address).value


def write(address: int, value: int) -> None:
    """Write a word to an address."""
    ctypes.c_int64.from_address(address).value = value


def _memory(n_bytes: int) -> int:
    """Return the address of memory that is never freed, aligned to a line of the cache."""
    array = np.zeros(n_bytes + 64, np.uint8)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))
    return -(-array.ctypes.data // 64) * 64
