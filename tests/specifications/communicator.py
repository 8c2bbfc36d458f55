"""The communicator as an executable specification: exchange everything, then use NumPy."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Sequence

from synkhronos.comms.base import Broadcast, Communicator, Reduction

if TYPE_CHECKING:
    from synkhronos._typing import Array


class NaiveCommunicator(Communicator):
    """Every array is sent to every rank as bytes."""

    def _exchange(self, item: Any) -> list[Any]:
        return [pickle.loads(item) for item in self.group.exchange(pickle.dumps(item))]

    def prepare_broadcast(self, root: int) -> Broadcast:
        return lambda arrays: self._exchange(arrays if self.rank == root else None)[root]

    def gather(self, arrays: Sequence[Array], root: int) -> list[list[Array]] | None:
        gathered = self.all_gather(arrays)
        return gathered if self.rank == root else None

    def all_gather(self, arrays: Sequence[Array]) -> list[list[Array]]:
        return [list(by_rank) for by_rank in zip(*self._exchange(arrays))]

    def prepare_reduction(self, op: str, root: int | None = None) -> Reduction:
        def reduce(
            arrays: Sequence[Array], weight: float = 1, wires: Sequence[Any] = ()
        ) -> Sequence[Array]:
            by_rank, weights = zip(*self._exchange((arrays, weight)))
            operation = self.check_reducible(op, by_rank, weights)
            if root not in (None, self.rank):
                return arrays
            return [operation.reduce(one, weights) for one in zip(*by_rank)]

        return reduce
