"""A communicator that prepares each collective when it is first called, for callers that repeat it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

from synkhronos.comms.base import Broadcast, Communicator, PreparingCommunicator, Reduction

if TYPE_CHECKING:
    from synkhronos._typing import Array


class RepeatingCommunicator(PreparingCommunicator):
    """Calls the collectives of a communicator again and again, on arrays of one kind.

    Parameters
    ----------
    comm : Communicator
        The communicator whose collectives are called.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm.group)
        self._comm, self.reduces_in_place = comm, comm.reduces_in_place
        self._prepared: dict[Any, Any] = {}

    def takes(self, array: Array) -> bool:
        return self._comm.takes(array)

    def prepare_broadcast(self, root: int) -> Broadcast:
        if root not in self._prepared:
            self._prepared[root] = self._comm.prepare_broadcast(root)
        return self._prepared[root]

    def prepare_reduction(self, op: str, root: int | None = None) -> Reduction:
        if (op, root) not in self._prepared:
            self._prepared[op, root] = self._comm.prepare_reduction(op, root)
        return self._prepared[op, root]

    def gather(self, arrays: Sequence[Array], root: int) -> list[list[Array]] | None:
        return self._comm.gather(arrays, root)

    def all_gather(self, arrays: Sequence[Array]) -> list[list[Array]]:
        return self._comm.all_gather(arrays)
