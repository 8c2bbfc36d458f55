"""The communicator as an executable specification: exchange everything, then use NumPy."""

import pickle

from synkhronos.comms.base import Communicator


class NaiveCommunicator(Communicator):
    """Every array goes to every rank as bytes."""

    def _exchange(self, item):
        return [pickle.loads(item) for item in self.transport.exchange(pickle.dumps(item))]

    def broadcast(self, array, root):
        return self._exchange(array if self.rank == root else None)[root]

    def gather(self, array, root):
        arrays = self._exchange(array)
        return arrays if self.rank == root else None

    def all_gather(self, array):
        return self._exchange(array)

    def reduce(self, array, op, root, weight=1):
        reduced = self.all_reduce(array, op, weight)
        return reduced if self.rank == root else array

    def all_reduce(self, array, op, weight=1):
        arrays, weights = zip(*self._exchange((array, weight)))
        types = [(one.shape, one.dtype) for one in arrays]
        operation = self.check_reducible(op, types, weights)
        return operation.reduce(arrays, weights)
