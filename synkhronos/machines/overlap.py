"""All-reduces of a vector in buckets, which the progress processes do while the ranks compute.

MPI works only while a process calls it, and a rank computes its gradient in one call of a function. So
each rank copies a bucket to the named memory as soon as it is computed. The progress process of each
machine waits for the buckets of all ranks, in their order, and all-reduces them with the other progress
processes. When a rank has computed everything, it takes the results from the named memory, or waits for
them.

The named memory has a vector for each rank and a table. The table has, for each rank, how many buckets
it has put there and its number of rows; and how many buckets are reduced. It is zero between commands.

The progress process keeps the state of wire formats, such as the parts that were not sent. For a
checkpoint it copies the state to the named memory, where the leader finds it, or takes the state that
the leader has put there.

A progress process reduces the vectors of the ranks of its machine into the first one, which is then
reduced between the machines. The arithmetic is the same as in an all-reduce of all ranks, so on two
machines the results are bit-identical. On more machines, sums have another order.
"""

from __future__ import annotations

import functools
import pickle
import time
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from synkhronos._errors import CollectiveAbortedError
from synkhronos.arithmetic.operations import find_operation
from synkhronos.arithmetic.partition import Buckets
from synkhronos.comms.base import Linked
from synkhronos.comms.formats import make_wire
from synkhronos.comms.linked import LinkedCommunicator
from synkhronos.comms.wires import Kept, Wire, WireReduction, kept_by, restore
from synkhronos.machines.communicator import MachineGroup
from synkhronos.machines.leaders import Leaders, nap_after
from synkhronos.machines.progress_process import ProgressProcess, WorkContext
from synkhronos.services.registers import Register
from synkhronos.stores.named_memory import NamedMemory

_READY, _ROWS = range(2)  # columns; the first of the last row counts reduced buckets
_KEPT, _STATE = "ahead", "kept state of a wire format"


class RunningReduction(NamedTuple):
    """A reduction that has begun in this command.

    Attributes
    ----------
    buckets : Buckets
        The buckets of the vector.
    function : int
        The number of the function that computes the vector.
    vectors : list of numpy.ndarray
        The vectors of the ranks of this machine.
    table : numpy.ndarray
        The table in the named memory.
    """

    buckets: Buckets
    function: int
    vectors: list[np.ndarray]
    table: np.ndarray


class OverlappedReduction:
    """The reductions of one rank while it computes; each command can make one of them.

    Parameters
    ----------
    group : MachineGroup
        The ranks of this machine.
    check : callable
        Raises if the command cannot continue.
    is_free : callable
        Whether the progress process is free; in a program it is not.
    progress_process : ProgressProcess
        The progress process of this machine.
    first : int
        The rank of the leader in `group`.

    Attributes
    ----------
    running : RunningReduction or None
        The reduction that has begun in this command.
    """

    def __init__(
        self,
        group: MachineGroup,
        check: Callable[[], None],
        is_free: Callable[[], bool],
        progress_process: ProgressProcess,
        first: int,
    ) -> None:
        self._group, self._check, self._is_free = group, check, is_free
        self._progress_process, self._first = progress_process, first
        self.running: RunningReduction | None = None
        self._may_begin = False
        self._table: np.ndarray | None = None  # in the leader, while the progress process works

    def begin_command(self) -> None:
        """Begin a command."""
        self.running, self._may_begin = None, True

    def start(self, buckets: Buckets, number: int, array: np.ndarray, rows: int, function: int) -> None:
        """Let a bucket that is ready be reduced.

        Parameters
        ----------
        buckets : Buckets
            The buckets of the vector.
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
        place, own = buckets.slices()[number], self.running.vectors[self._group.rank]
        operation = find_operation(buckets.op)
        if rows or operation.weighted:
            own[place] = array[place]
        else:
            own[place] = operation.neutral(own.dtype)
        row = self.running.table[self._group.rank]
        row[_ROWS] = rows
        row[_READY] = number + 1

    def _begin(self, buckets: Buckets, function: int) -> None:
        may_begin, self._may_begin, self.running = self._may_begin, False, None
        if not (may_begin and self._is_free()):
            return
        size, leaders = self._group.size, self._group.leaders
        memory = _memory(self._progress_process.named_memory, buckets, size)
        self.running = RunningReduction(buckets, function, *memory)
        if leaders is not None:
            self._table = self.running.table
            self._progress_process.start(leaders.number, ReduceBuckets(buckets, size, self._first))

    def forget(self) -> None:
        """Discard the reduction that has begun: the vector may get another value."""
        self.running = None

    def finish(self, out: np.ndarray) -> None:
        """Wait for the reduction, and write it to an array.

        Raises
        ------
        CollectiveAbortedError
            If a rank called `abort` in the same command.
        """
        # A reduction has begun, so this is not None.
        (buckets, _, vectors, table), self.running = self.running, None  # type: ignore[misc]
        for number, place in enumerate(buckets.slices()):
            # mypy cannot infer the type of a lambda with a default.
            self._wait(lambda number=number: table[-1, _READY] > number)  # type: ignore[misc]
            out[place] = vectors[self._first][place]

    def kept(self, buckets: Buckets) -> Kept:
        """In the leader: fetch the state of a vector's format, once in a command."""
        memory, leaders = self._progress_process.named_memory, self._leaders
        self._progress_process.start(leaders.number, TransferWireState(buckets, is_given=False))
        find = functools.partial(_get_state, memory, buckets, leaders.number)
        kept: Kept = leaders.wait_inside(find, meets=False)
        self._progress_process.finish(leaders.wait)
        return kept._replace(rest=kept.rest.copy())

    def keep(self, buckets: Buckets, kept: Kept) -> None:
        """In the leader, once in a command: give this state to the progress process."""
        process, leaders = self._progress_process, self._leaders
        _put_state(process.named_memory, buckets, leaders.number, kept)
        process.start(leaders.number, TransferWireState(buckets, is_given=True))
        leaders.wait_inside(process.has_stopped, meets=False)
        process.finish(leaders.wait)

    @property
    def _leaders(self) -> Leaders:
        return self._group.leaders  # type: ignore[return-value]  # not None in the leader

    def _wait(self, ready: Callable[[], Any]) -> None:
        leaders = self._group.leaders
        if leaders is not None:
            leaders.wait_inside(ready, meets=False)
            return
        began = time.monotonic()
        while not ready():
            self._check()
            time.sleep(nap_after(time.monotonic() - began))

    def end(self) -> None:
        """In the leader, at the end of a command that all ranks of this machine have left."""
        if self._table is not None:
            self._progress_process.finish(self._leaders.wait)
            self._table[...] = 0
            self.running = self._table = None


class ReduceBuckets(NamedTuple):
    """A progress process's part of the reduction. It is a `Work`.

    Attributes
    ----------
    buckets : Buckets
        The buckets of the vector.
    size : int
        The number of ranks on this machine.
    first : int
        The rank of the leader among them. Its vector gets the results.
    """

    buckets: Buckets
    size: int
    first: int

    def run(self, context: WorkContext) -> None:
        leaders, communicator = _communicator_of(context)
        # The ranks need the cores.
        leaders.begin_world(may_poll=False, watch=lambda inside: _check(context))
        leaders.begin(context.number)
        try:
            self._reduce(context.named_memory, leaders, communicator)
        except CollectiveAbortedError:
            leaders.abort()

    def _reduce(
        self, named_memory: NamedMemory, leaders: Leaders, communicator: BucketCommunicator
    ) -> None:
        vectors, table = _memory(named_memory, self.buckets, self.size)
        order = [self.first, *(rank for rank in range(self.size) if rank != self.first)]
        vectors = [vectors[rank] for rank in order]
        for number in range(len(self.buckets.shapes)):
            leaders.wait(  # as above
                lambda number=number: (table[:-1, _READY] > number).all()  # type: ignore[misc]
            )
            rows = [int(table[rank, _ROWS]) for rank in order]
            communicator.all_reduce(self.buckets, number, vectors, rows)
            table[-1, _READY] = number + 1


def _check(context: WorkContext) -> None:
    if context.is_over():
        raise CollectiveAbortedError("the ranks of this machine have left the command")


def _memory(
    named_memory: NamedMemory, buckets: Buckets, size: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the vectors of the ranks of a machine, and the table."""
    vectors = [_vector(named_memory, buckets, rank) for rank in range(size)]
    return vectors, named_memory.array("ahead", (size + 1, 2), np.int64)


def _vector(named_memory: NamedMemory, buckets: Buckets, rank: int) -> np.ndarray:
    """Return the memory for the vector of a rank of a machine.

    Vectors of the same size have the same memory. Between commands nothing refers to it, so it can be
    freed at the end of a program.
    """
    return named_memory.array(
        f"ahead {buckets.dtype} {buckets.size} {rank}", buckets.size, buckets.dtype
    )


def _communicator_of(context: WorkContext) -> tuple[Leaders, BucketCommunicator]:
    """Return what a progress process reduces buckets with, shared by all `Work` of a world."""
    if _KEPT not in context.kept:
        leaders = Leaders(context.links)
        context.kept[_KEPT] = leaders, BucketCommunicator(leaders)
    return context.kept[_KEPT]


def _put_state(named_memory: NamedMemory, buckets: Buckets, number: int, kept: Kept) -> None:
    """Put a vector's `Kept` where `_get_state` finds it, in the command with a number.

    The parts that were not sent come into the memory of the first rank's vector.
    """
    _vector(named_memory, buckets, 0)[: kept.rest.size] = kept.rest
    others = kept.counts, kept.rest.size, kept.factors
    Register(named_memory, _STATE).write(number, pickle.dumps(others, pickle.HIGHEST_PROTOCOL))


def _get_state(named_memory: NamedMemory, buckets: Buckets, number: int) -> Kept | None:
    """Return a vector's `Kept`, which shares the vector's memory, or None if it is not there."""
    found = Register(named_memory, _STATE).read()
    if found is None or found[0] != number:
        return None
    counts, size, factors = pickle.loads(found[1])
    return Kept(counts, _vector(named_memory, buckets, 0)[:size], factors)


class TransferWireState(NamedTuple):
    """A progress process's part of the transfer of a wire format's state. It is a `Work`.

    Attributes
    ----------
    buckets : Buckets
        The buckets of the vector.
    is_given : bool
        Whether the leader gives the state or gets it.
    """

    buckets: Buckets
    is_given: bool

    def run(self, context: WorkContext) -> None:
        wires = _communicator_of(context)[1].wires(self.buckets)
        if self.is_given:
            kept = _get_state(context.named_memory, self.buckets, context.number)
            restore(wires, self.buckets.sizes(), kept)  # type: ignore[arg-type]  # it is there
        else:
            _put_state(context.named_memory, self.buckets, context.number, kept_by(wires))


# Reducing buckets


class BucketCommunicator:
    """Reduces buckets, and keeps the states of wire formats between reductions.

    Parameters
    ----------
    group : Linked
        The machines.
    """

    def __init__(self, group: Linked) -> None:
        self._linked = LinkedCommunicator(group)
        self._wires = WireReduction(self._linked)
        self._kept: dict[int, list[Wire]] = {}  # by the number of the vector

    def all_reduce(
        self, buckets: Buckets, number: int, vectors: Sequence[np.ndarray], weights: Sequence[int]
    ) -> None:
        """Set a bucket of the first vector to its reduction over all ranks.

        Parameters
        ----------
        buckets : Buckets
            The buckets of the vector.
        number : int
            The number of the bucket.
        vectors : list of numpy.ndarray
            The vectors of this machine's ranks. Vectors of weight 0 are ignored in an average.
        weights : list of int
            The weight of each vector.
        """
        operation, place = find_operation(buckets.op), buckets.slices()[number]
        active = [
            (vector[place], weight)
            for vector, weight in zip(vectors, weights)
            if weight or not operation.weighted
        ]
        own = vectors[0][place]
        if active and len(vectors) > 1:
            operation.reduce_in_pieces(own, *zip(*active))
        total = sum(weights)
        if buckets.wire is None:
            [reduced] = self._linked.all_reduce([own], buckets.op, total)
        else:
            wire = self.wires(buckets)[number]
            [reduced] = self._wires.all_reduce([own], buckets.op, total, [wire])
        if reduced is not own:
            own[...] = reduced

    def wires(self, buckets: Buckets) -> list[Wire]:
        """Return the state of the wire format for each bucket of a vector."""
        if buckets.number not in self._kept:
            self._kept[buckets.number] = [make_wire(buckets.wire, shapes) for shapes in buckets.shapes]
        return self._kept[buckets.number]
