"""The communicator for NumPy arrays of ranks that share memory.

An array that is not yet in shared memory is copied there; one that is stays where it is. As the callers
keep the returned array as the shared variable's storage, and most updates write in place, the copy is
made once and the collectives then work on the variables themselves.

A reduction is a reduce-scatter and an all-gather in one pass: each rank reduces its own part, in pieces
that stay in the cache, and writes it to every rank's array. Every element is read and written once a
rank, and the bits are the same everywhere since each is computed once.
"""

import pickle

from synkhronos._partition import share
from synkhronos.comms.base import Communicator

_PIECE_BYTES = 1 << 17


class SharedMemoryCommunicator(Communicator):
    """Collectives by reference: ranks exchange where their arrays are, not what is in them."""

    def __init__(self, transport):
        super().__init__(transport)
        self.memory = transport.memory

    def _meet(self, array, weight=1):
        """Return this rank's array, placed, and every rank's arrays and weights."""
        own = self.memory.place(array)
        item = pickle.dumps((self.memory.reference(own), weight))
        references, weights = zip(*map(pickle.loads, self.transport.exchange(item)))
        return own, [self.memory.open(reference) for reference in references], weights

    def broadcast(self, array, root):
        own, arrays, _ = self._meet(array)
        if self.rank != root:
            own = _copy_into(own, arrays[root])
        self.transport.barrier()
        return own

    def gather(self, array, root):
        _, arrays, _ = self._meet(array)
        gathered = [array.copy() for array in arrays] if self.rank == root else None
        self.transport.barrier()
        return gathered

    def all_gather(self, array):
        _, arrays, _ = self._meet(array)
        gathered = [array.copy() for array in arrays]
        self.transport.barrier()
        return gathered

    def reduce(self, array, op, root, weight=1):
        own, arrays, weights = self._meet(array, weight)
        self._reduce_part(op, arrays, weights, [root])
        self.transport.barrier()
        return own

    def all_reduce(self, array, op, weight=1):
        own, arrays, weights = self._meet(array, weight)
        self._reduce_part(op, arrays, weights, range(self.size))
        self.transport.barrier()
        return own

    def _reduce_part(self, op, arrays, weights, targets):
        """Reduce this rank's part of the elements into the arrays of the ranks `targets`."""
        types = [(array.shape, array.dtype) for array in arrays]
        operation = self.check_reducible(op, types, weights)
        first, *others = targets
        ranks = [first, *(rank for rank in range(self.size) if rank != first)]
        if operation.weighted:
            ranks = [rank for rank in ranks if weights[rank]]
        weights = [weights[rank] for rank in ranks]
        flat = [array.reshape(-1) for array in arrays]
        start, stop = share(flat[0].size, self.size, self.rank)
        step = max(1, _PIECE_BYTES // flat[0].itemsize)
        for low in range(start, stop, step):
            piece = slice(low, min(low + step, stop))
            reduced = flat[first][piece]
            operation.reduce_into(reduced, [flat[rank][piece] for rank in ranks], weights)
            for rank in others:
                flat[rank][piece] = reduced


def _copy_into(own, array):
    if own.shape == array.shape and own.dtype == array.dtype:
        own[...] = array
        return own
    return array.copy()
