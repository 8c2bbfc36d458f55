"""All-reduces of plain arrays in programs, prepared once for arrays of a kind."""

from __future__ import annotations

from typing import Any, Callable, Hashable, Sequence

import numpy as np

from synkhronos._typing import AnyArray, ReduceOp
from synkhronos.arithmetic.operations import Operation, find_operation
from synkhronos.comms.base import Communicator, Reduction

_MOST = 32  # kinds of arrays whose reductions are kept


class ArrayReductions:
    """All-reduces of arrays that are no shared variables.

    Parameters
    ----------
    meet : callable
        ``meet("all_reduce", *what)`` waits for all processes, and raises if they differ in `what`.
    find_communicator : callable
        Returns the communicator.
    """

    def __init__(
        self, meet: Callable[..., list[Any]], find_communicator: Callable[[], Communicator]
    ) -> None:
        self._meet, self._find_communicator = meet, find_communicator
        self._prepared: dict[tuple[Hashable, ...], Reduction] = {}

    def __len__(self) -> int:
        """Return the number of reductions that are kept."""
        return len(self._prepared)

    def all_reduce(
        self, given: Sequence[Any], op: ReduceOp, weight: float | None = None
    ) -> list[AnyArray]:
        """Return the reductions of arrays, which are not changed.

        Parameters
        ----------
        given : list of array-like
            Of the same shapes and dtypes in every process.
        op : {"avg", "sum", "prod", "min", "max"}
            The operation.
        weight : float, optional
            The weight of this process in ``"avg"``; by default 1.
        """
        operation = find_operation(op)
        check_weight(operation, weight)
        arrays = [np.array(each, order="C") for each in given]
        for array in arrays:
            operation.check_dtype(array.dtype, "an array")
        kind = op, *(f"{each.dtype}{list(each.shape)}" for each in arrays)
        self._meet("all_reduce", *kind)
        if kind not in self._prepared:
            if len(self._prepared) >= _MOST:  # in every process at the same point
                self._prepared.clear()
            self._prepared[kind] = self._find_communicator().prepare_reduction(op)
        reduced = self._prepared[kind](arrays, 1 if weight is None else weight)
        return [np.array(each) for each in reduced]  # as other processes will write to their memory

    def clear(self) -> None:
        """Free what is kept."""
        self._prepared.clear()


def check_weight(operation: Operation, weight: float | None) -> None:
    """Raise unless a weight suits an operation."""
    if weight is not None and not operation.weighted:
        name = operation.name
        raise ValueError(f"weight: expected none for the operation {name!r}, which is not an average")
    if weight is not None and (not np.isfinite(weight) or weight < 0):
        raise ValueError(f"weight: expected a number of at least 0, got {weight!r}")
