"""The communicator for NumPy arrays of ranks that share memory.

Arrays that are not yet in shared memory are copied there; those that are stay where they are. As the
callers keep the returned arrays as the shared variables' storage, and most updates write in place, the
copy is made once and the collectives then work on the variables themselves.

A reduction is a reduce-scatter and an all-gather in one pass: the elements of all arrays, as if joined
to one, are shared out; each rank reduces its part, in pieces that stay in the cache, and writes it to
every rank's arrays. Every element is read and written once a rank, and the bits are the same everywhere
since each is computed once.
"""

import pickle
import struct

from synkhronos._operations import pieces
from synkhronos._partition import share
from synkhronos.comms.base import Communicator

_WEIGHT = struct.Struct("d")


class SharedMemoryCommunicator(Communicator):
    """Collectives by reference: ranks exchange where their arrays are, not what is in them."""

    def __init__(self, transport):
        super().__init__(transport)
        self.memory = transport.memory
        # What the last collective found out: training repeats the same one step after step.
        self._placed, self._said = [], b""
        self._heard, self._arrays = [b""] * transport.size, [[]] * transport.size
        self._plan = _Plan(None, None, None, None)

    def broadcast(self, arrays, root):
        placed, by_rank, _ = self._meet(arrays)
        if self.rank != root:
            placed = [_copy_into(own, array) for own, array in zip(placed, by_rank[root])]
        self.transport.barrier()
        return placed

    def gather(self, arrays, root):
        gathered = None
        _, by_rank, _ = self._meet(arrays)
        if self.rank == root:
            gathered = [[array.copy() for array in one] for one in zip(*by_rank)]
        self.transport.barrier()
        return gathered

    def all_gather(self, arrays):
        _, by_rank, _ = self._meet(arrays)
        gathered = [[array.copy() for array in one] for one in zip(*by_rank)]
        self.transport.barrier()
        return gathered

    def reduce(self, arrays, op, root, weight=1):
        placed, by_rank, weights = self._meet(arrays, weight)
        self.reduce_part(op, by_rank, weights, (root,))
        self.transport.barrier()
        return placed

    def all_reduce(self, arrays, op, weight=1):
        placed, by_rank, weights = self._meet(arrays, weight)
        self.reduce_part(op, by_rank, weights, tuple(range(self.size)))
        self.transport.barrier()
        return placed

    def _meet(self, arrays, weight=1):
        """Return this rank's arrays, placed, and every rank's arrays and weights, by rank."""
        if not _are_same(arrays, self._placed):
            self._placed, self._plan = [], _Plan(None, None, None, None)  # let go of their memory
            self._placed = [self.memory.place(array) for array in arrays]
            self._said = pickle.dumps([self.memory.reference(array) for array in self._placed])
        weights = []
        for rank, item in enumerate(self.transport.exchange(_WEIGHT.pack(weight) + self._said)):
            weights.append(_WEIGHT.unpack_from(item)[0])
            said = item[_WEIGHT.size :]
            if said != self._heard[rank]:
                self._heard[rank] = said
                self._arrays[rank] = [self.memory.open(reference) for reference in pickle.loads(said)]
        return self._placed, list(self._arrays), weights

    def reduce_part(self, op, by_rank, weights, targets):
        """Reduce this rank's part of the elements into the arrays of the ranks `targets`."""
        zero = [rank for rank, weight in enumerate(weights) if not weight]
        plan = self._plan
        if not (
            plan.op == op
            and plan.targets == targets
            and plan.zero == zero
            and _are_same(plan.by_rank, by_rank)
        ):
            operation = self.check_reducible(op, by_rank, weights)
            plan = _Plan(op, targets, zero, by_rank)
            plan.make_pieces(operation, self.rank)
            self._plan = plan
        active = [weights[rank] for rank in plan.active]
        for reduced, parts, others in plan.pieces:
            plan.operation.reduce_into(reduced, parts, active)
            for other in others:
                other[...] = reduced


class _Plan:
    """The pieces of a reduction that are this rank's to do."""

    def __init__(self, op, targets, zero, by_rank):
        self.op, self.targets, self.zero, self.by_rank = op, targets, zero, by_rank

    def make_pieces(self, operation, rank):
        """Find, for each piece, where it goes first, what it is made of, and where else it goes."""
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
            for piece in pieces(low, high, flat[0].itemsize):
                parts = [flat[one][piece] for one in self.active]
                self.pieces.append((flat[first][piece], parts, [flat[one][piece] for one in others]))


def _are_same(some, others):
    """Whether two lists hold the very same objects."""
    if some is None or len(some) != len(others):
        return False
    return all([one is other for one, other in zip(some, others)])


def _copy_into(own, array):
    if own.shape == array.shape and own.dtype == array.dtype:
        own[...] = array
        return own
    return array.copy()
