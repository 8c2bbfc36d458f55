"""What a communicator must do. `naive` says it in the fewest words; ``tests/checks`` conforms it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol, Sequence

from synkhronos._typing import Array
from synkhronos.arithmetic.operations import Operation, find_operation


class Group(Protocol):
    """The ranks among which a communicator works: what it needs of a transport."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Wait until every rank has called this."""

    def exchange(self, item: bytes) -> list[bytes]:
        """Return the bytes `item` of every rank, by rank."""


class Communicator(ABC):
    """Collectives on a list of arrays per rank; all ranks call the same ones in the same order.

    An array is a NumPy array, or of another type that the communicator knows.

    The lists have the same length on every rank, and an array of one rank is combined with those at
    the same place in the others' lists. However many arrays there are, they travel together.

    A communicator may use the memory of the arrays that it is given, and may return arrays that other
    ranks can reach: use the returned arrays from then on, not the given ones.

    Attributes
    ----------
    rank, size : int
    reduces_in_place : bool
        Whether there are arrays that it reduces where they are, so that outputs are better reduced by
        it than sent to the master.
    """

    reduces_in_place = False

    def __init__(self, group: Group) -> None:
        self.group = group
        self.size = group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def over_cpu(self) -> Communicator:
        """The communicator that uses the CPU's memory: this one, unless it has another."""
        return self

    def takes(self, array: Array) -> bool:
        """Whether it reduces this array in place."""
        return False

    @abstractmethod
    def broadcast(self, arrays: Sequence[Array], root: int) -> list[Array]:
        """Return the arrays of rank `root`. Those of the others only provide memory for them."""

    @abstractmethod
    def gather(self, arrays: Sequence[Array], root: int) -> list[list[Array]] | None:
        """Return, on rank `root`, for each array a list by rank of NumPy arrays; shapes may differ.

        None on the other ranks.
        """

    @abstractmethod
    def all_gather(self, arrays: Sequence[Array]) -> list[list[Array]]:
        """Return for each array a list by rank; shapes may differ."""

    @abstractmethod
    def reduce(
        self, arrays: Sequence[Array], op: str, root: int, weight: float = 1
    ) -> Sequence[Array]:
        """Return the reductions on rank `root`; on the others the given arrays.

        Parameters
        ----------
        op : str
            A name of `synkhronos.arithmetic.operations.OPERATIONS`.
        weight : float
            This rank's weight in ``"avg"``.

        Raises
        ------
        ValueError
            On every rank, if shapes or dtypes differ; the message lists them by rank.
        """

    @abstractmethod
    def all_reduce(self, arrays: Sequence[Array], op: str, weight: float = 1) -> Sequence[Array]:
        """Return the reductions on every rank, with the same bits on each. See `reduce`."""

    @staticmethod
    def check_reducible(
        op: str, by_rank: Sequence[Sequence[Array]], weights: Sequence[float]
    ) -> Operation:
        """Return the `Operation` if every rank's arrays, in a list by rank, can be reduced by it."""
        operation = find_operation(op)
        for arrays in zip(*by_rank):
            types = [(array.shape, array.dtype) for array in arrays]
            if any(one != types[0] for one in types):
                listed = "; ".join(
                    f"rank {rank}: {shape} {dtype}" for rank, (shape, dtype) in enumerate(types)
                )
                raise ValueError(
                    f"reduction {op!r}: expected the same shape on every rank, got {listed}; use "
                    f"gather for unequal shapes"
                )
            operation.check_dtype(types[0][1], "a shared variable")
        if operation.weighted and not any(weights):
            raise ValueError(f"reduction {op!r}: the weights of all ranks are zero: {weights}")
        return operation
