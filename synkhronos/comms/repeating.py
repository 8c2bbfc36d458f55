"""A communicator that prepares each collective when it is first called, for callers that repeat it."""

from __future__ import annotations

from typing import Any

from synkhronos.comms.base import Communicator, PreparingCommunicator


class RepeatingCommunicator(PreparingCommunicator):
    """Calls the collectives of another communicator again and again, on arrays of one kind.

    Parameters
    ----------
    comm : Communicator
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm.group)
        self._comm, self.reduces_in_place = comm, comm.reduces_in_place
        self._prepared: dict[Any, Any] = {}

    @property
    def has_wires(self):
        return self._comm.has_wires

    def takes(self, array):
        return self._comm.takes(array)

    def prepare_broadcast(self, root):
        if root not in self._prepared:
            self._prepared[root] = self._comm.prepare_broadcast(root)
        return self._prepared[root]

    def prepare_reduction(self, op, root=None):
        if (op, root) not in self._prepared:
            self._prepared[op, root] = self._comm.prepare_reduction(op, root)
        return self._prepared[op, root]

    def gather(self, arrays, root):
        return self._comm.gather(arrays, root)

    def all_gather(self, arrays):
        return self._comm.all_gather(arrays)
