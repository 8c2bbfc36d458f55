"""All-reduces of a vector in buckets, which the couriers do while the ranks compute.

MPI works only while a process calls it, and a rank computes its gradient in one call of a function. So
each rank copies a bucket to the commons as soon as it is computed. The courier of each machine waits for
the buckets of all ranks, in their order, and all-reduces them with the other couriers. When a rank has
computed everything, it takes the results from the commons, or waits for them.

The commons have a vector for each rank and a table. The table has, for each rank, how many buckets it
has put there and its number of rows; and how many buckets are reduced. It is zero between commands.
"""

from __future__ import annotations

import time
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos._errors import CollectiveAbortedError
from synkhronos.arithmetic.buckets import Buckets
from synkhronos.arithmetic.operations import find_operation
from synkhronos.comms.wire_state import Kept
from synkhronos.machines.courier import Courier, Desk
from synkhronos.machines.leaders import LONGEST_NAP, SHARE, SHORTEST_NAP
from synkhronos.machines.wire_state import CopyKept, Shelf, communicator_of, vector
from synkhronos.stores.commons import Commons

_READY, _ROWS = range(2)  # columns; the first of the last row counts reduced buckets


class Running(NamedTuple):
    """A reduction that has begun in this command.

    Attributes
    ----------
    buckets : Buckets
    function : int
        The number of the function that computes the vector.
    vectors : list of numpy.ndarray
        The vectors of the ranks of this machine.
    table : numpy.ndarray
    """

    buckets: Buckets
    function: int
    vectors: list[np.ndarray]
    table: np.ndarray


class Ahead:
    """The reductions of one rank; each command can make one of them.

    Parameters
    ----------
    inside : Inside
        The ranks of this machine.
    check : callable
        Raises if the command cannot continue.
    is_free : callable
        Whether the courier is free; in a program it is not.
    courier : Courier
    first : int
        The rank of the leader in `inside`.

    Attributes
    ----------
    running : Running or None
    """

    def __init__(
        self,
        inside: Any,
        check: Callable[[], None],
        is_free: Callable[[], bool],
        courier: Courier,
        first: int,
    ) -> None:
        self._inside, self._check, self._is_free = inside, check, is_free
        self._courier, self._first = courier, first
        self.running: Running | None = None
        self._may_begin = False
        self._table: np.ndarray | None = None  # in the leader, while the courier works

    def begin_command(self) -> None:
        """Begin a command."""
        self.running, self._may_begin = None, True

    def start(self, buckets: Buckets, number: int, array: np.ndarray, rows: int, function: int) -> None:
        """Let a bucket that is ready be reduced.

        Parameters
        ----------
        buckets : Buckets
        number : int
            The number of the bucket: 0, 1, ...
        array : numpy.ndarray
            The vector.
        rows : int
            The number of rows from which this rank has computed it.
        function : int
            The number of the function that computes it.
        """
        if number == 0:
            self._begin(buckets, function)
        if self.running is None:
            return
        place, own = buckets.slices()[number], self.running.vectors[self._inside.rank]
        operation = find_operation(buckets.op)
        if rows or operation.weighted:
            own[place] = array[place]
        else:
            own[place] = operation.neutral(own.dtype)
        row = self.running.table[self._inside.rank]
        row[_ROWS] = rows
        row[_READY] = number + 1

    def _begin(self, buckets, function):
        may_begin, self._may_begin, self.running = self._may_begin, False, None
        if not (may_begin and self._is_free()):
            return
        size, leaders = self._inside.size, self._inside.leaders
        self.running = Running(buckets, function, *_memory(self._courier.commons, buckets, size))
        if leaders is not None:
            self._table = self.running.table
            self._courier.start(leaders.number, ReduceAhead(buckets, size, self._first))

    def forget(self) -> None:
        """Discard what is being reduced: the vector may get another value."""
        self.running = None

    def finish(self, out: np.ndarray) -> None:
        """Wait for the reduction, and write it to an array.

        Raises
        ------
        CollectiveAbortedError
            If a rank called `abort` in the same command.
        """
        (buckets, _, vectors, table), self.running = self.running, None  # type: ignore[misc]
        for number, place in enumerate(buckets.slices()):
            self._wait(lambda number=number: table[-1, _READY] > number)
            out[place] = vectors[self._first][place]

    def kept(self, buckets: Buckets) -> Kept:
        """In the leader, once in a command: return what the courier keeps for the format of a vector."""
        found = self._copy_kept(buckets, is_given=False).get()
        return found._replace(rest=found.rest.copy(), factors=found.factors.copy())

    def keep(self, buckets: Buckets, kept: Kept) -> None:
        """In the leader, once in a command: let the courier keep this."""
        Shelf(self._courier.commons, buckets).put(kept)
        self._copy_kept(buckets, is_given=True)

    def _copy_kept(self, buckets, is_given):
        leaders, shelf = self._inside.leaders, Shelf(self._courier.commons, buckets)
        self._table = shelf.table
        self._courier.start(leaders.number, CopyKept(buckets, is_given))
        leaders.wait_inside(shelf.is_done, meets=False)
        return shelf

    def _wait(self, ready):
        leaders = self._inside.leaders
        if leaders is not None:
            leaders.wait_inside(ready, meets=False)
            return
        began = time.monotonic()
        while not ready():
            self._check()
            waited = time.monotonic() - began
            time.sleep(min(max(SHARE * waited, SHORTEST_NAP), LONGEST_NAP))

    def end(self) -> None:
        """In the leader, at the end of a command that all ranks of this machine have left."""
        if self._table is not None:
            self._courier.end()
            self._inside.leaders.wait(self._courier.has_stopped)
            self._table[...] = 0
            self.running = self._table = None


class ReduceAhead:
    """What a courier does for the reduction. It is a `Work`.

    Parameters
    ----------
    buckets : Buckets
    size : int
        The number of ranks on this machine.
    first : int
        The rank of the leader among them. Its vector gets the results.
    """

    def __init__(self, buckets: Buckets, size: int, first: int) -> None:
        self._buckets, self._size, self._first = buckets, size, first

    def run(self, desk: Desk) -> None:
        leaders, communicator = communicator_of(desk)
        leaders.watch = lambda inside: _check(desk)
        leaders.begin(desk.number)
        try:
            self._reduce(desk.commons, leaders, communicator)
        except CollectiveAbortedError:
            leaders.abort()

    def _reduce(self, commons, leaders, communicator):
        vectors, table = _memory(commons, self._buckets, self._size)
        order = [self._first, *(rank for rank in range(self._size) if rank != self._first)]
        vectors = [vectors[rank] for rank in order]
        for number in range(len(self._buckets.shapes)):
            leaders.wait(lambda number=number: (table[:-1, _READY] > number).all())
            rows = [int(table[rank, _ROWS]) for rank in order]
            communicator.all_reduce(self._buckets, number, vectors, rows)
            table[-1, _READY] = number + 1


def _check(desk):
    if desk.is_over():
        raise CollectiveAbortedError("the ranks of this machine have left the command")


def _memory(commons: Commons, buckets: Buckets, size: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the vectors of the ranks of a machine, and the table."""
    vectors = [vector(commons, buckets, rank) for rank in range(size)]
    return vectors, commons.array("ahead", (size + 1, 2), np.int64)
