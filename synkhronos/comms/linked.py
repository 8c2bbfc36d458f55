"""The communicator of ranks that share no memory: collectives by messages.

A reduction begins with a meeting: every rank sends to all others a digest of the shapes and dtypes, with
which the ranks check that they are equal, and its weight. The smallest arrays are part of the meeting:
every rank gets and reduces all of them. The parts of larger arrays are reduced by one rank each, see
`DirectReduction`. Both have the order of operands of `pairwise`, so results are bit-identical on every
rank, and do not depend on the size of other arrays.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import struct
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Callable, Sequence

import numpy as np

from synkhronos.arithmetic.operations import Operation, find_operation
from synkhronos.arithmetic.pairwise import PairwiseReduction
from synkhronos.arithmetic.partition import share
from synkhronos.comms.base import ArraySpec, Broadcast, Communicator, Linked, Reduction, are_same

if TYPE_CHECKING:
    from synkhronos._typing import Array

#: The bytes of small arrays that a rank receives in a meeting, from all others together
SMALL = 1 << 16
_ALIGNMENT = 16  # bytes
_HEAD = struct.Struct("=8sd")  # of an item: digest of the types, weight
_START = 32  # of the small arrays in an item

CHUNK = 240 << 10  # bytes
_PARTS, _RESULTS = range(2)  # streams of arrays


class LinkedCommunicator(Communicator):
    """Collectives by messages.

    Parameters
    ----------
    group : Linked
        The ranks.
    """

    group: Linked

    def __init__(self, group: Linked) -> None:
        super().__init__(group)
        self._memory = np.empty(0, np.uint8)

    def prepare_broadcast(self, root: int) -> Broadcast:
        return lambda arrays: self._broadcast(arrays, root)

    def _broadcast(self, arrays: Sequence[Array], root: int) -> Sequence[Array]:
        is_root = self.rank == root
        contents = [np.asarray(array, order="C") for array in arrays] if is_root else []
        types, small = self._meet(contents)[root]
        others = [rank for rank in range(self.size) if rank != root]
        sent, receipts = [], []
        received = arrays if is_root else [_room_for(*item) for item in zip(arrays, types)]
        for index, array in enumerate(contents if is_root else received):
            if index in small:
                if not is_root:
                    array[...] = small[index]
            elif is_root:
                sent += [self.group.send_array(to, array) for to in others]
            else:
                receipts.append(self.group.receive_array(root, array))
        self.group.complete(receipts, sent)
        return received

    def gather(self, arrays: Sequence[Array], root: int) -> list[list[Array]] | None:
        return self._gather(arrays, [root])

    def all_gather(self, arrays: Sequence[Array]) -> list[list[Array]]:
        return self._gather(arrays, range(self.size))  # type: ignore[return-value]  # to all ranks

    def _gather(self, arrays: Sequence[Array], roots: Sequence[int]) -> list[list[Array]] | None:
        contents = [np.asarray(array, order="C") for array in arrays]
        met = self._meet(contents)
        large = [array for index, array in enumerate(contents) if index not in met[self.rank][1]]
        sent = [self.group.send_array(to, item) for item in large for to in roots if to != self.rank]
        by_rank, receipts = [], []
        if self.rank in roots:
            for rank, (types, small) in enumerate(met):
                received = [small[i] if i in small else np.empty(*kind) for i, kind in enumerate(types)]
                by_rank.append([array.copy() for array in contents] if rank == self.rank else received)
                if rank != self.rank:
                    receipts += [
                        self.group.receive_array(rank, array)
                        for index, array in enumerate(received)
                        if index not in small
                    ]
        self.group.complete(receipts, sent)
        return [list(item) for item in zip(*by_rank)] if self.rank in roots else None

    def prepare_reduction(self, op: str, root: int | None = None) -> Reduction:
        operation, targets = find_operation(op), range(self.size) if root is None else [root]
        limit = SMALL // max(self.size - 1, 1)
        batch = _Batch([], limit)

        def reduce(
            arrays: Sequence[Array], weight: float = 1, wires: Sequence[Any] = ()
        ) -> Sequence[Array]:
            nonlocal batch
            contents = [changeable(array, self.rank in targets) for array in arrays]
            if not (are_same(arrays, contents) and are_same(contents, batch.arrays)):
                batch = _Batch(contents, limit)
            self._reduce(batch, op, operation, targets, weight)
            return contents if self.rank in targets else arrays

        return reduce

    def _reduce(
        self, batch: _Batch, op: str, operation: Operation, targets: Sequence[int], weight: float
    ) -> None:
        """Reduce the arrays of a batch in place on the ranks in `targets`."""
        met = self.group.exchange(batch.pack(weight))  # type: ignore[arg-type]  # sent like bytes
        heads = [_HEAD.unpack_from(item) for item in met]
        if any([digest != batch.digest for digest, _ in heads]):
            types = [pickle.loads(item) for item in self.group.exchange(pickle.dumps(batch.types))]
            self.check_reducible(op, types, [1] * self.size)
        weights = [weight for _, weight in heads]
        self.check_reducible(op, [batch.types], weights)
        arithmetic = PairwiseReduction(operation, weights)
        if self.rank in targets and batch.small:
            self.reduce_part(batch.reduce_small, arithmetic, met)
        for index in batch.large:
            DirectReduction(self, arithmetic, batch.arrays[index].reshape(-1), targets).run()

    def reduce_part(self, reduce: Callable[..., object], *arguments: Any) -> None:
        """Do a part of the arithmetic. It is a method so that it can be timed."""
        reduce(*arguments)

    def timed(self) -> list[tuple[str, object, str]]:
        waits = [("wait", self.group, method) for method in ("complete", "exchange")]
        return [*super().timed(), *waits]

    def _meet(self, contents: Sequence[np.ndarray]) -> list[Any]:
        """Return by rank: the types of its arrays, and a dict of the small arrays by index."""
        types = [ArraySpec(array.shape, array.dtype) for array in contents]
        small = {index: contents[index] for index in _small(types)}
        item = pickle.dumps((types, small), pickle.HIGHEST_PROTOCOL)
        return [pickle.loads(payload) for payload in self.group.exchange(item)]

    def memory(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Return memory for `size` items, which is reused."""
        nbytes = size * dtype.itemsize
        if self._memory.size < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes].view(dtype)


class _Batch:
    """The arrays of a reduction, and the item that this rank sends for them.

    Attributes
    ----------
    small, large : list of int
        The indices of the arrays that are part of the meeting, and of the others.
    """

    def __init__(self, arrays: Sequence[np.ndarray], limit: int) -> None:
        self.arrays = arrays
        self.types = [ArraySpec(array.shape, array.dtype) for array in arrays]
        self.small = _small(self.types, limit)
        self.large = [index for index in range(len(arrays)) if index not in self.small]
        self.digest = hashlib.blake2b(repr(self.types).encode(), digest_size=8).digest()
        self._places, stop = [], _START
        for index in self.small:
            start, stop = stop, stop + self.types[index].nbytes
            self._places.append(slice(start, stop))
            stop = -(-stop // _ALIGNMENT) * _ALIGNMENT
        # Used in turn: when a rank has passed a meeting, all have received its item of the previous one.
        self._item, self._next = np.empty((2, stop), np.uint8)

    def pack(self, weight: float) -> np.ndarray:
        """Return the item for a meeting."""
        self._item, self._next = self._next, self._item
        _HEAD.pack_into(self._item, 0, self.digest, weight)
        for index, place in zip(self.small, self._places):
            self._item[place] = self.arrays[index].reshape(-1).view(np.uint8)
        return self._item

    def reduce_small(self, arithmetic: PairwiseReduction, items: Sequence[bytes]) -> None:
        """Reduce the small arrays of all ranks into this rank's."""
        parts = [
            (
                self.arrays[index].reshape(-1),
                [np.frombuffer(item, np.uint8)[place].view(self.types[index].dtype) for item in items],
            )
            for index, place in zip(self.small, self._places)
        ]
        if arithmetic.size > 2:
            for out, arrays in parts:
                arithmetic.reduce(out, arrays)
            return
        used = [rank for rank, is_active in enumerate(arithmetic.active) if is_active]
        weights = [arithmetic.weights[rank] for rank in used]
        arithmetic.operation.reduce_each(
            [(out, [arrays[rank] for rank in used], ()) for out, arrays in parts], weights
        )


def _small(types: Sequence[ArraySpec], limit: int = SMALL) -> list[int]:
    """Return the indices of the smallest arrays, whose bytes together are within a limit."""
    chosen, total = [], 0
    for nbytes, index in sorted((kind.nbytes, index) for index, kind in enumerate(types)):
        total += nbytes
        if total > limit:
            break
        chosen.append(index)
    return chosen


def changeable(array: np.ndarray, is_target: bool = True) -> np.ndarray:
    """Return the array to reduce into: the given array if possible, where the result is wanted."""
    if is_target and array.flags.c_contiguous and array.flags.writeable:
        return array
    return np.array(array, order="C")


def _room_for(array: np.ndarray, kind: ArraySpec) -> np.ndarray:
    """Return memory for an array of another rank: the given array, if it fits."""
    fits = (array.shape, array.dtype) == kind and array.flags.c_contiguous and array.flags.writeable
    return array if fits else np.empty(*kind)


# Large arrays


class ChunkedReduction(ABC):
    """The reduction of a large flat array, in place, on the ranks in `targets`.

    A reduce-scatter and an all-gather: each rank receives its part of the elements from every other
    rank, reduces it, and sends the result to all. It sends and receives ``2 (size - 1) / size`` times
    the bytes of the array, which is the minimum [1]_, in ``2 (size - 1)`` messages or more. The parts
    are sent in chunks; a chunk is reduced while the next chunks are being sent. A rank sends a few
    chunks ahead of those received, so memory and messages under way do not grow with the array.

    .. [1] Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.

    Parameters
    ----------
    comm : LinkedCommunicator
        The communicator of these ranks.
    array : numpy.ndarray
        The flat array of this rank.
    length : int
        The length of a chunk.
    active : list of bool
        Whether the array of each rank is reduced.
    targets : list of int
        The ranks that get the result.

    Attributes
    ----------
    window : int
        The chunks that a rank sends to another rank before it has received the first from it.
    parts : list of list of slice
        The chunks of the part of each rank.
    """

    window = 3

    def __init__(
        self,
        comm: LinkedCommunicator,
        array: np.ndarray,
        length: int,
        active: Sequence[bool],
        targets: Sequence[int],
    ) -> None:
        self.comm, self.rank, self.array, self.targets = comm, comm.rank, array, targets
        self.parts = [chunks(*share(array.size, comm.size, rank), length) for rank in range(comm.size)]
        self.own = self.parts[self.rank]
        # Each rank begins with the next rank, as otherwise rank 0 would get the chunks of all at once.
        self.others = [(self.rank + step) % comm.size for step in range(1, comm.size)]
        self.senders = [rank for rank in self.others if active[rank]]
        self._is_active = active[self.rank]

    def run(self) -> None:
        """Reduce the array. All ranks call it."""
        group, count, window = self.comm.group, max(map(len, self.parts)), self.window
        is_target = self.rank in self.targets
        to = [rank for rank in self.others if rank in self.targets]
        # By number of a chunk: receipts of parts, parts that were sent, and both of results
        coming: dict[int, list] = {}
        sent: dict[int, list[int]] = {}
        results: dict[int, tuple[list, list[int]]] = {}
        for turn in range(count + 2 * window):
            number = turn - 2 * window
            if number >= 0:
                group.complete(*results.pop(number))
                for rank in self._with_chunk(number) if is_target else ():
                    self.take_result(rank, number)
            number += window
            if 0 <= number < count:
                group.complete(coming.pop(number))
                sent_results = []
                if number < len(self.own):
                    result = self.reduce(number)
                    sent_results = [group.send_array(rank, result, _RESULTS) for rank in to]
                # The result of a chunk may arrive in its memory, so the chunk has to be sent first.
                group.complete([], sent.pop(number))
                arriving = [
                    group.receive_array(rank, self.room_for_result(rank, number), _RESULTS)
                    for rank in (self._with_chunk(number) if is_target else ())
                ]
                results[number] = arriving, sent_results
            if turn < count:
                coming[turn] = [
                    group.receive_array(rank, self.room_for_part(rank, turn), _PARTS)
                    for rank in (self.senders if turn < len(self.own) else ())
                ]
                sent[turn] = [
                    group.send_array(rank, self.part(rank, turn), _PARTS)
                    for rank in (self._with_chunk(turn) if self._is_active else ())
                ]

    def _with_chunk(self, number: int) -> list[int]:
        """Return the other ranks whose parts have so many chunks."""
        return [rank for rank in self.others if number < len(self.parts[rank])]

    @abstractmethod
    def part(self, rank: int, number: int) -> np.ndarray:
        """Return what another rank gets of a chunk of its part."""

    @abstractmethod
    def room_for_part(self, rank: int, number: int) -> np.ndarray:
        """Return the memory for the same from another rank. Later chunks use it again."""

    @abstractmethod
    def reduce(self, number: int) -> np.ndarray:
        """Reduce a chunk of this rank's part, and return what the targets get of it."""

    @abstractmethod
    def room_for_result(self, rank: int, number: int) -> np.ndarray:
        """Return the memory for the same from another rank."""

    def take_result(self, rank: int, number: int) -> None:  # noqa: B027
        """Put the result of another rank, which has arrived, into the array."""


class DirectReduction(ChunkedReduction):
    """The reduction of an array whose elements are sent as they are.

    Parameters
    ----------
    comm : LinkedCommunicator
        The communicator of these ranks.
    arithmetic : PairwiseReduction
        The operation, and the ranks whose arrays are reduced.
    array : numpy.ndarray
        The flat array of this rank.
    targets : list of int
        The ranks that get the result.
    """

    def __init__(
        self,
        comm: LinkedCommunicator,
        arithmetic: PairwiseReduction,
        array: np.ndarray,
        targets: Sequence[int],
    ) -> None:
        length = max(CHUNK // array.itemsize, 1)
        super().__init__(comm, array, length, arithmetic.active, targets)
        self._arithmetic = arithmetic
        shape = comm.size, min(self.window, len(self.own)), min(length, array.size)
        self._memory = comm.memory(math.prod(shape), array.dtype).reshape(shape)

    def part(self, rank: int, number: int) -> np.ndarray:
        return self.array[self.parts[rank][number]]

    room_for_result = part

    def room_for_part(self, rank: int, number: int) -> np.ndarray:
        chunk = self.own[number]
        return self._memory[rank, number % self.window, : chunk.stop - chunk.start]

    def reduce(self, number: int) -> np.ndarray:
        own = self.part(self.rank, number)
        arrays: list[np.ndarray | None] = [None] * self.comm.size
        for rank in self.senders:
            arrays[rank] = self.room_for_part(rank, number)
        arrays[self.rank] = own
        self.comm.reduce_part(self._arithmetic.reduce, own, arrays)
        return own


def chunks(start: int, stop: int, length: int) -> list[slice]:
    """Split the items from `start` to `stop` into chunks of a length; the last may be shorter."""
    return [slice(low, min(low + length, stop)) for low in range(start, stop, length)]
