"""The interface of communicators. ``tests/specifications/communicator.py`` specifies it."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from typing import Any, Callable, NamedTuple, Protocol, Sequence

import numpy as np

from synkhronos._typing import Array
from synkhronos.arithmetic.operations import Operation, find_operation


class ArraySpec(NamedTuple):
    """Shape and dtype of an array, as sent to other ranks."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Group(Protocol):
    """The ranks that a communicator connects: the part of a transport that it uses."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Wait until every rank has called this method."""

    def exchange(self, item: bytes) -> list[bytes]:
        """Return the bytes `item` of every rank, by rank."""


class Linked(Group, Protocol):
    """Ranks that can also send arrays to each other: the part of `Leaders` that communicators use."""

    def send_array(self, to: int, array: np.ndarray, stream: int = 0) -> int:
        """Start to send a C-contiguous array; return a number for `complete`."""

    def receive_array(self, source: int, array: np.ndarray, stream: int = 0) -> Any:
        """Start to receive the next array of a stream; return a receipt for `complete`."""

    def complete(self, receipts: Sequence[Any], sent: Sequence[int] = ()) -> None:
        """Wait until arrays have been received and sent. All ranks call it equally often."""


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists contain the same objects, by identity."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


#: Broadcasts arrays
Broadcast = Callable[[Sequence[Array]], Sequence[Array]]

#: Reduces arrays, with this rank's weight, by default 1
Reduction = Callable[..., Sequence[Array]]


class Communicator(ABC):
    """Collectives on a list of arrays per rank; all ranks call the same collectives in the same order.

    An array is a NumPy array, or of another type that the communicator supports.

    The lists have the same length on every rank. An array of one rank is combined with the arrays at the
    same position in the lists of the other ranks. All arrays are exchanged together.

    A communicator may use the memory of the given arrays, and may return arrays that other ranks can
    access. Afterwards, use the returned arrays instead of the given arrays.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    reduces_in_place : bool
        Whether it reduces some arrays in place. Outputs are then reduced by the communicator instead of
        being sent to the master.
    has_wires : bool
        Whether it has ranks on several machines, between which reductions may send wire formats.
    """

    reduces_in_place = False
    has_wires = False

    def __init__(self, group: Group) -> None:
        self.group = group
        self.size = group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def over_cpu(self) -> Communicator:
        """The communicator to use for transfers through CPU memory; by default, itself."""
        return self

    def takes(self, array: Array) -> bool:
        """Whether it reduces this array in place."""
        return False

    def broadcast(self, arrays: Sequence[Array], root: int) -> Sequence[Array]:
        """Return the arrays of rank `root`. The arrays of other ranks only provide memory."""
        return self.prepare_broadcast(root)(arrays)

    @abstractmethod
    def gather(self, arrays: Sequence[Array], root: int) -> list[list[Array]] | None:
        """Return, for each array, a list of NumPy arrays by rank; shapes may differ.

        Only rank `root` gets it; other ranks get None.
        """

    @abstractmethod
    def all_gather(self, arrays: Sequence[Array]) -> list[list[Array]]:
        """Return, for each array, a list of arrays by rank; shapes may differ."""

    def reduce(self, arrays: Sequence[Array], op: str, root: int, weight: float = 1) -> Sequence[Array]:
        """Return the reductions on rank `root`, and the given arrays on other ranks.

        Parameters
        ----------
        op : str
            A name of `synkhronos.arithmetic.operations.OPERATIONS`.
        weight : float
            This rank's weight in ``"avg"``.

        Raises
        ------
        ValueError
            On every rank, if shapes or dtypes differ. The message lists them by rank.
        """
        return self.prepare_reduction(op, root)(arrays, weight)

    def all_reduce(self, arrays: Sequence[Array], op: str, weight: float = 1) -> Sequence[Array]:
        """Return the reductions on every rank, bit-identical on all ranks. See `reduce`."""
        return self.prepare_reduction(op)(arrays, weight)

    @abstractmethod
    def prepare_broadcast(self, root: int) -> Broadcast:
        """Return a function of arrays that does the same as `broadcast`, again and again.

        The function may keep what its calls have in common. All ranks call the functions that
        they have prepared at the same time.
        """

    @abstractmethod
    def prepare_reduction(self, op: str, root: int | None = None) -> Reduction:
        """Return a function of arrays and a weight that does the same as `reduce`, or `all_reduce`.

        Without a root, it has a third argument: a `Wire` for each array, the format in which the array
        is sent between machines. See `prepare_broadcast`.
        """

    def timed(self) -> list[tuple[str, object, str]]:
        """Return the methods that `profile` times: the category, the owner and the name of each."""
        return [("reduce", self, "reduce_part")] if hasattr(self, "reduce_part") else []

    @staticmethod
    def check_reducible(
        op: str, by_rank: Sequence[Sequence[Array]], weights: Sequence[float]
    ) -> Operation:
        """Return the `Operation`, or raise if it cannot reduce these arrays, a list by rank."""
        operation = find_operation(op)
        for arrays in zip(*by_rank):
            types = [(array.shape, array.dtype) for array in arrays]
            if any(kind != types[0] for kind in types):
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


class SingleRankCommunicator(Communicator):
    """Every collective returns this rank's own arrays."""

    def prepare_broadcast(self, root: int) -> Broadcast:
        return lambda arrays: arrays

    def gather(self, arrays: Sequence[Array], root: int) -> list[list[Array]] | None:
        return self.all_gather(arrays)

    def all_gather(self, arrays: Sequence[Array]) -> list[list[Array]]:
        return [[array.copy()] for array in arrays]

    def prepare_reduction(self, op: str, root: int | None = None) -> Reduction:
        def reduce(
            arrays: Sequence[Array], weight: float = 1, wires: Sequence[Any] = ()
        ) -> Sequence[Array]:
            self.check_reducible(op, [arrays], [weight])
            return [array if array.flags.writeable else array.copy() for array in arrays]

        return reduce
