"""The communicator for NumPy arrays of ranks that share memory.

Arrays that are not yet in shared memory are copied there; others are used in place. Callers keep the
returned arrays as the storage of the shared variables, and most updates write in place. So the copy is
made once, and later collectives work on the variables themselves.

A reduction is a reduce-scatter and an all-gather in a single pass. The elements of all arrays, taken
together, are divided among the ranks. Each rank reduces its part, in pieces that fit in the cache, and
writes the result to the arrays of every rank. Every element is read and written once per rank. Each
result is computed once, so it is bit-identical on every rank.
"""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Any, List, Sequence, Tuple

from synkhronos.arithmetic.operations import Operation, are_equal
from synkhronos.arithmetic.partition import share
from synkhronos.comms.base import Broadcast, Communicator, Group, Reduction, are_same

if TYPE_CHECKING:
    import numpy as np

    from synkhronos._typing import Array
    from synkhronos.stores.base import SharedMemoryStore

_WEIGHT = struct.Struct("d")

# An array to reduce into, the operands, and the arrays to which the result is copied
_Piece = Tuple["np.ndarray", List["np.ndarray"], List["np.ndarray"]]


class SharedMemoryCommunicator(Communicator):
    """Collectives by reference: ranks exchange handles to their arrays, not the values.

    Parameters
    ----------
    group : Group
        The ranks.
    store : SharedMemoryStore
        The store in whose memory the arrays are.
    """

    def __init__(self, group: Group, store: SharedMemoryStore) -> None:
        super().__init__(group)
        self.store = store
        self._all_ranks = tuple(range(group.size))

    def prepare_broadcast(self, root: int) -> Broadcast:
        meeting = _Meeting(self.group, self.store)

        def broadcast(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
            placed, by_rank, _ = meeting.hold(arrays)
            if self.rank != root:
                placed = [_copy_into(own, array) for own, array in zip(placed, by_rank[root])]
            self.group.barrier()
            return placed

        return broadcast

    def gather(self, arrays: Sequence[Array], root: int) -> list[list[Array]] | None:
        return self._gather(arrays, self.rank == root)

    def all_gather(self, arrays: Sequence[Array]) -> list[list[Array]]:
        return self._gather(arrays, True)  # type: ignore[return-value]  # it is wanted

    def _gather(self, arrays: Sequence[Array], is_wanted: bool) -> list[list[Array]] | None:
        _, by_rank, _ = _Meeting(self.group, self.store).hold(arrays)
        gathered = [[array.copy() for array in item] for item in zip(*by_rank)] if is_wanted else None
        self.group.barrier()
        return gathered

    def prepare_reduction(self, op: str, root: int | None = None) -> Reduction:
        reduction = _Reduction(self, op, self._all_ranks if root is None else (root,))
        return reduction.run

    def reduce_part(
        self, pieces: Sequence[_Piece], operation: Operation, weights: Sequence[float] | None
    ) -> None:
        """Reduce this rank's part of the elements. It is a method so that it can be timed."""
        operation.reduce_each(pieces, weights)


class _Meeting:
    """An exchange of handles to the arrays of each rank, which is repeated.

    A rank that comes with the same arrays again sends the same handles, and finds the arrays of the
    others as before.
    """

    def __init__(self, group: Group, store: SharedMemoryStore) -> None:
        self._group, self._store = group, store
        self._sent = b""
        self._forget()

    # A signal handler may raise between any two lines: what is half changed is marked as unknown before.

    def _forget(self) -> None:
        self._weight: float | None = None  # of this rank; None if nothing was sent
        self._placed: list[np.ndarray] = []  # this rank's arrays
        self._ids: list[int] = []
        # The bytes that every rank has sent, and the arrays and weights in them
        self._received = [b""] * self._group.size
        self._arrays: list[list[np.ndarray]] = [[]] * self._group.size
        self._weights: list[float] = []

    def hold(
        self, arrays: Sequence[np.ndarray], weight: float = 1
    ) -> tuple[list[np.ndarray], list[list[np.ndarray]], list[float]]:
        """Return this rank's arrays in shared memory, and all arrays and weights by rank."""
        if self._weight is None or list(map(id, arrays)) != self._ids:
            self._forget()  # frees their memory
            self._placed = [self._store.place(array) for array in arrays]
            self._ids = list(map(id, self._placed))
            handles = pickle.dumps([self._store.put(array) for array in self._placed])
            self._sent, self._weight = _WEIGHT.pack(weight) + handles, weight
        elif weight != self._weight:
            self._weight = None
            self._sent, self._weight = _WEIGHT.pack(weight) + self._sent[_WEIGHT.size :], weight
        received = self._group.exchange(self._sent)
        if received != self._received:
            self._open(received)
        return self._placed, self._arrays, self._weights

    def _open(self, received: list[bytes]) -> None:
        """Find the arrays and the weights that were sent; arrays that have not moved are kept."""
        arrays, former = list(self._arrays), self._received
        self._received = [b""] * len(received)
        for rank, (item, last) in enumerate(zip(received, former)):
            handles = item[_WEIGHT.size :]
            if handles != last[_WEIGHT.size :]:
                arrays[rank] = [self._store.get(handle) for handle in pickle.loads(handles)]
        self._weights = [_WEIGHT.unpack_from(item)[0] for item in received]
        self._arrays, self._received = arrays, received


class _Reduction(_Meeting):
    """A reduction of this rank's part of the elements, into the arrays of the ranks in `targets`."""

    def __init__(self, comm: SharedMemoryCommunicator, op: str, targets: Sequence[int]) -> None:
        super().__init__(comm.group, comm.store)
        self._comm, self._op, self._targets = comm, op, targets

    def _forget(self) -> None:
        super()._forget()
        # The weights of the pieces, and which of them are zero
        self._weighed: list[float] | None = None
        self._zero: list[int] = []
        self._by_rank: list[list[np.ndarray]] = []
        self._pieces: list[_Piece] = []

    def run(
        self, arrays: Sequence[np.ndarray], weight: float = 1, wires: Sequence[Any] = ()
    ) -> list[np.ndarray]:
        placed, by_rank, weights = self.hold(arrays, weight)
        if self._weighed is not weights:
            self._prepare(by_rank, weights)
        self._comm.reduce_part(self._pieces, self._operation, self._active_weights)
        self._group.barrier()
        return placed

    def _prepare(self, by_rank: list[list[np.ndarray]], weights: list[float]) -> None:
        """Find the pieces, unless only weights that are not zero differ from the last time."""
        zero = [rank for rank, weight in enumerate(weights) if not weight]
        if self._zero != zero or not are_same(self._by_rank, by_rank):
            self._weighed, self._by_rank = None, []  # in case of an error
            self._operation = self._comm.check_reducible(self._op, by_rank, weights)
            self._zero, self._by_rank = zero, by_rank
            self._make_pieces()
        self._weighed = weights
        active = [weights[rank] for rank in self._active]
        self._active_weights = None if are_equal(active) else active

    def _make_pieces(self) -> None:
        """Find, for each piece, the array to reduce into, the operands, and where to copy the result."""
        operation = self._operation
        first, *others = self._targets
        size = len(self._by_rank)
        self._active = [first, *(other for other in range(size) if other != first)]
        if operation.weighted:
            self._active = [item for item in self._active if item not in self._zero]
        start, stop = share(sum(array.size for array in self._by_rank[0]), size, self._comm.rank)
        self._pieces = []
        passed = 0
        for arrays in zip(*self._by_rank):
            flat = [array.reshape(-1) for array in arrays]
            low, high = max(start - passed, 0), min(stop - passed, flat[0].size)
            passed += flat[0].size
            for piece in operation.pieces(low, high, flat[0].itemsize):
                parts = [flat[item][piece] for item in self._active]
                self._pieces.append((flat[first][piece], parts, [flat[item][piece] for item in others]))


def _copy_into(own: np.ndarray, array: np.ndarray) -> np.ndarray:
    if own.shape == array.shape and own.dtype == array.dtype:
        own[...] = array
        return own
    return array.copy()
