"""The communicator of a single rank, such as on a machine with one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

from synkhronos.comms.base import Communicator

if TYPE_CHECKING:
    from synkhronos._typing import Array


class SingleRankCommunicator(Communicator):
    """Every collective returns this rank's own arrays."""

    def broadcast(self, arrays: Sequence[Array], root: int) -> Sequence[Array]:
        return arrays

    def gather(self, arrays: Sequence[Array], root: int) -> list[list[Array]] | None:
        return self.all_gather(arrays)

    def all_gather(self, arrays: Sequence[Array]) -> list[list[Array]]:
        return [[array.copy()] for array in arrays]

    def reduce(self, arrays: Sequence[Array], op: str, root: int, weight: float = 1) -> Sequence[Array]:
        return self.all_reduce(arrays, op, weight)

    def all_reduce(self, arrays: Sequence[Array], op: str, weight: float = 1) -> Sequence[Array]:
        self.check_reducible(op, [arrays], [weight])
        return [array if array.flags.writeable else array.copy() for array in arrays]
