"""The communicator as an executable specification: exchange everything, then use NumPy."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Sequence

from synkhronos.comms.base import Communicator

if TYPE_CHECKING:
    from synkhronos._typing import Array


class NaiveCommunicator(Communicator):
    """Every array is sent to every rank as bytes."""

    def _exchange(self, item: Any) -> list[Any]:
        return [pickle.loads(item) for item in self.group.exchange(pickle.dumps(item))]

    def broadcast(self, arrays: Sequence[Array], root: int) -> Sequence[Array]:
        return self._exchange(arrays if self.rank == root else None)[root]

    def gather(self, arrays: Sequence[Array], root: int) -> list[list[Array]] | None:
        gathered = self.all_gather(arrays)
        return gathered if self.rank == root else None

    def all_gather(self, arrays: Sequence[Array]) -> list[list[Array]]:
        return [list(by_rank) for by_rank in zip(*self._exchange(arrays))]

    def reduce(self, arrays: Sequence[Array], op: str, root: int, weight: float = 1) -> Sequence[Array]:
        reduced = self.all_reduce(arrays, op, weight)
        return reduced if self.rank == root else arrays

    def all_reduce(self, arrays: Sequence[Array], op: str, weight: float = 1) -> Sequence[Array]:
        by_rank, weights = zip(*self._exchange((arrays, weight)))
        operation = self.check_reducible(op, by_rank, weights)
        return [operation.reduce(one, weights) for one in zip(*by_rank)]
