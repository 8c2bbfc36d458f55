"""The communicator for NumPy arrays of ranks that share memory.

Arrays that are not yet in shared memory are copied there; others are used in place. Callers keep the
returned arrays as the storage of the shared variables, and most updates write in place. So the copy is
made once, and later collectives work on the variables themselves.

A reduction is a reduce-scatter and an all-gather in a single pass. The elements of all arrays, taken
together, are divided among the ranks. Each rank reduces its part, in pieces that fit in the cache, and
writes the result to the arrays of every rank. Every element is read and written once per rank. Each
result is computed once, so it is bit-identical on every rank.
"""

import pickle
import struct

from synkhronos.arithmetic.averages import are_equal
from synkhronos.arithmetic.partition import share
from synkhronos.comms.base import Communicator

_WEIGHT = struct.Struct("d")


class SharedMemoryCommunicator(Communicator):
    """Collectives by reference: ranks exchange handles to their arrays, not the values.

    Parameters
    ----------
    group : Group
    store : SharedMemoryStore
    """

    def __init__(self, group, store):
        super().__init__(group)
        self.store = store
        self._all_ranks = tuple(range(group.size))
        self.forget()

    def forget(self):
        # Kept from the last collective, because training repeats it in every step: this rank's arrays,
        # weight, and the bytes sent for them; the bytes that every rank sent, the arrays and weights.
        self._placed, self._weight, self._sent = [], None, b""
        self._received, self._arrays, self._weights = [b""] * self.size, [[]] * self.size, []
        self._plan = _Plan(None, None, None, None)

    def broadcast(self, arrays, root):
        placed, by_rank, _ = self._meet(arrays)
        if self.rank != root:
            placed = [_copy_into(own, array) for own, array in zip(placed, by_rank[root])]
        self.group.barrier()
        return placed

    def gather(self, arrays, root):
        gathered = None
        _, by_rank, _ = self._meet(arrays)
        if self.rank == root:
            gathered = [[array.copy() for array in one] for one in zip(*by_rank)]
        self.group.barrier()
        return gathered

    def all_gather(self, arrays):
        _, by_rank, _ = self._meet(arrays)
        gathered = [[array.copy() for array in one] for one in zip(*by_rank)]
        self.group.barrier()
        return gathered

    def reduce(self, arrays, op, root, weight=1):
        placed, by_rank, weights = self._meet(arrays, weight)
        self.reduce_part(op, by_rank, weights, (root,))
        self.group.barrier()
        return placed

    def all_reduce(self, arrays, op, weight=1):
        placed, by_rank, weights = self._meet(arrays, weight)
        self.reduce_part(op, by_rank, weights, self._all_ranks)
        self.group.barrier()
        return placed

    def _meet(self, arrays, weight=1):
        """Return this rank's arrays in shared memory, and all arrays and weights by rank."""
        if not _are_same(arrays, self._placed):
            self._placed, self._plan = [], _Plan(None, None, None, None)  # frees their memory
            self._placed = [self.store.place(array) for array in arrays]
            handles = pickle.dumps([self.store.put(array) for array in self._placed])
            self._weight, self._sent = weight, _WEIGHT.pack(weight) + handles
        elif weight != self._weight:
            self._weight, self._sent = weight, _WEIGHT.pack(weight) + self._sent[_WEIGHT.size :]
        received = self.group.exchange(self._sent)
        if received != self._received:
            self._open(received)
        return self._placed, self._arrays, self._weights

    def _open(self, received):
        """Find the arrays and the weights that were sent; those of the last time are used again."""
        arrays = list(self._arrays)
        for rank, (item, last) in enumerate(zip(received, self._received)):
            handles = item[_WEIGHT.size :]
            if handles != last[_WEIGHT.size :]:
                arrays[rank] = [self.store.get(handle) for handle in pickle.loads(handles)]
        self._weights = [_WEIGHT.unpack_from(item)[0] for item in received]
        self._received, self._arrays = received, arrays

    def reduce_part(self, op, by_rank, weights, targets):
        """Reduce this rank's part of the elements into the arrays of the ranks in `targets`."""
        plan = self._plan
        if plan.weights is not weights or plan.op != op or plan.targets != targets:
            plan = self._make_plan(op, by_rank, weights, targets)
        plan.operation.reduce_each(plan.pieces, plan.active_weights)

    def _make_plan(self, op, by_rank, weights, targets):
        """Return the plan of a reduction; the last one, if only weights that are not zero differ."""
        zero = [rank for rank, weight in enumerate(weights) if not weight]
        plan = self._plan
        if (plan.op, plan.targets, plan.zero) != (op, targets, zero) or not _are_same(
            plan.by_rank, by_rank
        ):
            operation = self.check_reducible(op, by_rank, weights)
            plan = _Plan(op, targets, zero, by_rank)
            plan.make_pieces(operation, self.rank)
            self._plan = plan
        plan.weigh(weights)
        return plan


class _Plan:
    """The pieces of a reduction that this rank computes."""

    weights = None

    def __init__(self, op, targets, zero, by_rank):
        self.op, self.targets, self.zero, self.by_rank = op, targets, zero, by_rank

    def weigh(self, weights):
        """Use these weights, which are zero for the same ranks as before."""
        self.weights = weights
        active = [weights[rank] for rank in self.active]
        self.active_weights = None if are_equal(active) else active

    def make_pieces(self, operation, rank):
        """Find, for each piece, the array to reduce into, the operands, and where to copy it."""
        self.operation = operation
        first, *others = self.targets
        size = len(self.by_rank)
        self.active = [first, *(other for other in range(size) if other != first)]
        if operation.weighted:
            self.active = [one for one in self.active if one not in self.zero]
        start, stop = share(sum(array.size for array in self.by_rank[0]), size, rank)
        self.pieces = []
        passed = 0
        for arrays in zip(*self.by_rank):
            flat = [array.reshape(-1) for array in arrays]
            low, high = max(start - passed, 0), min(stop - passed, flat[0].size)
            passed += flat[0].size
            for piece in operation.pieces(low, high, flat[0].itemsize):
                parts = [flat[one][piece] for one in self.active]
                self.pieces.append((flat[first][piece], parts, [flat[one][piece] for one in others]))


def _are_same(some, others):
    """Whether two lists contain the same objects, by identity."""
    return len(some) == len(others) and all([one is other for one, other in zip(some, others)])


def _copy_into(own, array):
    if own.shape == array.shape and own.dtype == array.dtype:
        own[...] = array
        return own
    return array.copy()
