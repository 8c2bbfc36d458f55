"""The communicator, through CPU memory, for arrays of devices that cannot communicate directly.

Each rank copies its arrays into shared memory. A communicator for NumPy arrays works on these copies in
place, and each rank copies the results back. The memory is reused by the next collective.
"""

import numpy as np

from synkhronos.comms.base import Communicator


class StagedCommunicator(Communicator):
    """Collectives on arrays of a device and on NumPy arrays.

    Parameters
    ----------
    comm : Communicator
        For NumPy arrays.
    store : Store
    read : callable
        ``read(array, out)`` copies an array of the device into a NumPy array.
    to_device : callable
        ``to_device(value)`` copies a NumPy array to a new array on the device.
    overwrite : callable
        ``overwrite(array, value)`` copies a NumPy array to a given array on the device, if that can be
        changed and has the same shape, else to a new one, and returns the array that has the values.
    """

    def __init__(self, comm, store, read, to_device, overwrite):
        super().__init__(comm.group)
        self._comm, self._store = comm, store
        self._read, self._to_device, self._overwrite = read, to_device, overwrite
        self._stages = []  # the last collective's arrays in shared memory, by position

    def forget(self):
        self._comm.forget()
        self._stages = []

    def broadcast(self, arrays, root):
        values = self._comm.broadcast(self._stage(arrays), root)
        if self.rank != root:
            return self._copy_back(arrays, values)
        return [
            value if isinstance(array, np.ndarray) else array for array, value in zip(arrays, values)
        ]

    def gather(self, arrays, root):
        return self._comm.gather(self._stage(arrays), root)

    def all_gather(self, arrays):
        gathered = self._comm.all_gather(self._stage(arrays))
        return [
            by_rank if isinstance(array, np.ndarray) else [self._to_device(one) for one in by_rank]
            for array, by_rank in zip(arrays, gathered)
        ]

    def reduce(self, arrays, op, root, weight=1):
        reduced = self._comm.reduce(self._stage(arrays), op, root, weight)
        return self._copy_back(arrays, reduced) if self.rank == root else arrays

    def all_reduce(self, arrays, op, weight=1):
        return self._copy_back(arrays, self._comm.all_reduce(self._stage(arrays), op, weight))

    @property
    def has_wires(self):
        return self._comm.has_wires

    def all_reduce_in(self, wires, arrays, op, weight=1):
        return self._copy_back(arrays, self._comm.all_reduce_in(wires, self._stage(arrays), op, weight))

    def _stage(self, arrays):
        """Return the arrays, with device arrays replaced by copies in shared memory."""
        kept, self._stages = self._stages, [None] * len(arrays)
        staged = list(arrays)
        for place, array in enumerate(arrays):
            if not isinstance(array, np.ndarray):
                stage = kept[place] if place < len(kept) else None
                if stage is None or (stage.shape, stage.dtype) != (array.shape, array.dtype):
                    stage = self._store.empty(array.shape, array.dtype)
                self._read(array, stage)
                staged[place] = self._stages[place] = stage
        return staged

    def _copy_back(self, arrays, values):
        """Return the values, copied back to the device where necessary."""
        return [
            value if isinstance(array, np.ndarray) else self._overwrite(array, value)
            for array, value in zip(arrays, values)
        ]
