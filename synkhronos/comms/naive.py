"""The communicator as an executable specification: exchange everything, then use NumPy."""

import pickle

from synkhronos.comms.base import Communicator


class NaiveCommunicator(Communicator):
    """Every array is sent to every rank as bytes."""

    def _exchange(self, item):
        return [pickle.loads(item) for item in self.group.exchange(pickle.dumps(item))]

    def broadcast(self, arrays, root):
        return self._exchange(arrays if self.rank == root else None)[root]

    def gather(self, arrays, root):
        gathered = self.all_gather(arrays)
        return gathered if self.rank == root else None

    def all_gather(self, arrays):
        return [list(by_rank) for by_rank in zip(*self._exchange(arrays))]

    def reduce(self, arrays, op, root, weight=1):
        reduced = self.all_reduce(arrays, op, weight)
        return reduced if self.rank == root else arrays

    def all_reduce(self, arrays, op, weight=1):
        by_rank, weights = zip(*self._exchange((arrays, weight)))
        operation = self.check_reducible(op, by_rank, weights)
        return [operation.reduce(one, weights) for one in zip(*by_rank)]
