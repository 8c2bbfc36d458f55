"""The communicator of ranks that share no memory: collectives by messages.

Small arrays are part of the meeting: every rank sends them to all others, and reduces all of them. A
meeting begins with a digest of the shapes and dtypes, with which the ranks check that they are equal.
Larger arrays take a reduce-scatter and an all-gather: each rank receives its part of the elements from
every other rank, reduces it, and sends the result to all. It sends and receives ``2 (size - 1) / size``
times the bytes of the array, which is the minimum [1]_. The parts are sent in chunks; a chunk is reduced
while the next chunks are being sent. A rank sends a few chunks ahead of those received, so memory
and messages under way do not grow with the array. Each element is reduced by one rank, or by all in the
same order, so results are bit-identical on every rank.

.. [1] Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import struct
from typing import TYPE_CHECKING, Any, Callable, Mapping, Protocol, Sequence

import numpy as np

from synkhronos.arithmetic.operations import Operation, find_operation
from synkhronos.arithmetic.partition import share
from synkhronos.comms.base import ArraySpec, Broadcast, PreparingCommunicator, Reduction

if TYPE_CHECKING:
    from synkhronos._typing import Array

#: Bytes of all small arrays together
SMALL = 1 << 16

_CHUNK = 240 << 10  # bytes
_WINDOW = 3  # chunks that a rank sends to each other rank before it has received the first from it
_ALIGNMENT = 16  # bytes
_HEAD = struct.Struct("=8sd")  # of an item: digest of the types, weight
_START = 32  # of the small arrays in an item
_PARTS, _RESULTS = range(2)  # streams of arrays


class Linked(Protocol):
    """Ranks that can also send arrays to each other: the part of `Leaders` that is used here."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Wait until every rank has called this method."""

    def exchange(self, item: bytes) -> list[bytes]:
        """Return the bytes `item` of every rank, by rank."""

    def send_array(self, to: int, array: np.ndarray, stream: int = 0) -> int:
        """Start to send a C-contiguous array; return a number for `complete`."""

    def receive_array(self, source: int, array: np.ndarray, stream: int = 0) -> Any:
        """Start to receive the next array of a stream; return a receipt for `complete`."""

    def complete(self, receipts: Sequence[Any], sent: Sequence[int] = ()) -> None:
        """Wait until arrays have been received and sent. All ranks call it equally often."""


class LinkedCommunicator(PreparingCommunicator):
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
        received = arrays if is_root else [_room_for(*one) for one in zip(arrays, types)]
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
        sent = [self.group.send_array(to, one) for one in large for to in roots if to != self.rank]
        by_rank, receipts = [], []
        if self.rank in roots:
            for rank, (types, small) in enumerate(met):
                received = [small[i] if i in small else np.empty(*one) for i, one in enumerate(types)]
                by_rank.append([array.copy() for array in contents] if rank == self.rank else received)
                if rank != self.rank:
                    receipts += [
                        self.group.receive_array(rank, array)
                        for index, array in enumerate(received)
                        if index not in small
                    ]
        self.group.complete(receipts, sent)
        return [list(one) for one in zip(*by_rank)] if self.rank in roots else None

    def prepare_reduction(self, op: str, root: int | None = None) -> Reduction:
        operation, targets = find_operation(op), range(self.size) if root is None else [root]
        batch = _Batch([])

        def reduce(
            arrays: Sequence[Array], weight: float = 1, wires: Sequence[Any] = ()
        ) -> Sequence[Array]:
            nonlocal batch
            contents = [_changeable(array, self.rank in targets) for array in arrays]
            if not (_are_same(arrays, contents) and _are_same(contents, batch.arrays)):
                batch = _Batch(contents)
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
        active = [rank for rank in range(self.size) if weights[rank] or not operation.weighted]
        scale = [weights[rank] for rank in active]
        if self.rank in targets and batch.small:
            items = [met[rank] for rank in active]
            self.reduce_part(batch.reduce_small, operation, items, scale)
        for index in batch.large:
            array = batch.arrays[index].reshape(-1)
            _Reduction(self, operation, array, dict(zip(active, scale)), targets).run()

    def reduce_part(self, reduce: Callable[..., object], *arguments: Any) -> None:
        """Do a part of the arithmetic. It is a method so that it can be timed."""
        reduce(*arguments)

    def timed(self) -> list[tuple[str, object, str]]:
        waits = [("wait", self.group, method) for method in ("complete", "exchange")]
        return [*super().timed(), *waits]

    def _meet(self, contents: Sequence[np.ndarray], *others: Any) -> list[Any]:
        """Return by rank: the types of its arrays, a dict of the small arrays by index, and `others`."""
        types = [ArraySpec(array.shape, array.dtype) for array in contents]
        small = {index: contents[index] for index in _small(types)}
        item = pickle.dumps((types, small, *others), pickle.HIGHEST_PROTOCOL)
        return [pickle.loads(one) for one in self.group.exchange(item)]

    def memory(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Return memory for `size` items, which is reused."""
        nbytes = size * dtype.itemsize
        if self._memory.size < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes].view(dtype)


class _Batch:
    """The arrays of a reduction, and the item that this rank sends for them."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self.types = [ArraySpec(array.shape, array.dtype) for array in arrays]
        self.small = _small(self.types)
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

    def reduce_small(
        self, operation: Operation, items: Sequence[bytes], weights: Sequence[float]
    ) -> None:
        """Reduce the small arrays of some ranks into this rank's."""
        parts = []
        for index, place in zip(self.small, self._places):
            shape, dtype = self.types[index]
            arrays = [np.frombuffer(item, np.uint8)[place].view(dtype).reshape(shape) for item in items]
            parts.append((self.arrays[index], arrays, ()))
        operation.reduce_each(parts, weights)


class _Reduction:
    """The reduction of a flat array, in place, on the ranks in `targets`.

    Parameters
    ----------
    comm : LinkedCommunicator
        The communicator of these ranks.
    operation : Operation
        The operation.
    array : numpy.ndarray
        The flat array of this rank.
    weights : dict
        The weights of the ranks whose arrays are reduced.
    targets : list of int
        The ranks that get the result.
    """

    def __init__(
        self,
        comm: LinkedCommunicator,
        operation: Operation,
        array: np.ndarray,
        weights: Mapping[int, float],
        targets: Sequence[int],
    ) -> None:
        self.comm, self.group, self.rank = comm, comm.group, comm.rank
        self.operation, self.weights, self.targets = operation, weights, targets
        self.parts = [_chunks(array, *share(array.size, comm.size, rank)) for rank in range(comm.size)]
        # Each rank begins with the next rank, as otherwise rank 0 would get the chunks of all at once.
        self.others = [(self.rank + step) % comm.size for step in range(1, comm.size)]
        self.senders = [rank for rank in self.others if rank in weights]
        own = self.parts[self.rank]
        shape = len(self.senders), min(_WINDOW, len(own)), own[0].size if own else 0
        self.memory = comm.memory(math.prod(shape), array.dtype).reshape(shape)
        self.receipts: dict[int, list] = {}  # by number of the chunk
        self.sent: dict[int, list[int]] = {}

    def run(self) -> None:
        own, count = self.parts[self.rank], max(len(part) for part in self.parts)
        results, arriving = [], []
        for number in range(_WINDOW):
            self._start(number)
        for number in range(count):
            self.group.complete(self.receipts.pop(number))
            if number < len(own):
                results += self._reduce_chunk(number)
            # The result of a chunk arrives in its memory, so the chunk has to be sent first.
            self.group.complete([], self.sent.pop(number))
            if self.rank in self.targets:
                arriving += [
                    self.group.receive_array(rank, self.parts[rank][number], _RESULTS)
                    for rank in self.others
                    if number < len(self.parts[rank])
                ]
            self._start(number + _WINDOW)
        self.group.complete(arriving, results)

    def _start(self, number: int) -> None:
        """Start to receive a chunk of this rank's part, and to send a chunk of each other part."""
        is_own = number < len(self.parts[self.rank])
        self.receipts[number] = [
            self.group.receive_array(rank, self._received(index, number), _PARTS)
            for index, rank in enumerate(self.senders)
            if is_own
        ]
        self.sent[number] = [
            self.group.send_array(rank, self.parts[rank][number], _PARTS)
            for rank in self.others
            if self.rank in self.weights and number < len(self.parts[rank])
        ]

    def _received(self, index: int, number: int) -> np.ndarray:
        """Return the memory for a chunk from a sender. It is used again by later chunks."""
        return self.memory[index, number % _WINDOW, : self.parts[self.rank][number].size]

    def _reduce_chunk(self, number: int) -> list[int]:
        own = self.parts[self.rank][number]
        arrays = [self._received(index, number) for index in range(len(self.senders))]
        weights = [self.weights[rank] for rank in self.senders]
        if self.rank in self.weights:
            arrays, weights = [own, *arrays], [self.weights[self.rank], *weights]
        self.comm.reduce_part(self.operation.reduce_in_pieces, own, arrays, weights)
        return [self.group.send_array(rank, own, _RESULTS) for rank in self.targets if rank != self.rank]


def _chunks(array: np.ndarray, start: int, stop: int) -> list[np.ndarray]:
    """Return views of the items from `start` to `stop`, in chunks."""
    step = max(_CHUNK // array.itemsize, 1)
    return [array[low : min(low + step, stop)] for low in range(start, stop, step)]


def _small(types: Sequence[ArraySpec]) -> list[int]:
    """Return the indices of the arrays that are part of the meeting: the smallest, up to a limit."""
    chosen, total = [], 0
    for nbytes, index in sorted((one.nbytes, index) for index, one in enumerate(types)):
        total += nbytes
        if total > SMALL:
            break
        chosen.append(index)
    return chosen


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all([one is other for one, other in zip(some, others)])


def _changeable(array: np.ndarray, is_target: bool) -> np.ndarray:
    """Return the array to reduce into: the given array if possible, where the result is wanted."""
    if is_target and array.flags.c_contiguous and array.flags.writeable:
        return array
    return np.array(array, order="C")


def _room_for(array: np.ndarray, kind: ArraySpec) -> np.ndarray:
    """Return memory for an array of another rank: the given array, if it fits."""
    fits = (array.shape, array.dtype) == kind and array.flags.c_contiguous and array.flags.writeable
    return array if fits else np.empty(*kind)
