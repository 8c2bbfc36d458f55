"""The communicator of a single rank, such as on a machine with one rank."""

from __future__ import annotations

from synkhronos.comms.base import Communicator


class AloneCommunicator(Communicator):
    """Every collective returns this rank's own arrays."""

    def broadcast(self, arrays, root):
        return arrays

    def gather(self, arrays, root):
        return self.all_gather(arrays)

    def all_gather(self, arrays):
        return [[array.copy()] for array in arrays]

    def reduce(self, arrays, op, root, weight=1):
        return self.all_reduce(arrays, op, weight)

    def all_reduce(self, arrays, op, weight=1):
        self.check_reducible(op, [arrays], [weight])
        return [array if array.flags.writeable else array.copy() for array in arrays]
