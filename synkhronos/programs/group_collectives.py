"""Collectives of processes that share memory but no transport: attached ones, and some of the ranks.

Processes come to a collective by themselves, so each first tells the others which collective it is at.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from typing import Any, Callable, Hashable, Sequence

import numpy as np

from synkhronos._errors import SynkhronosError
from synkhronos._typing import AnyArray, ArrayLike, ReduceOp
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


class GroupCollectives(ABC):
    """The collectives of a process, which is a member of a group."""

    #: What the members are called in messages, and one of them
    _names = "attached processes", "process"

    def __init__(self) -> None:
        self._reductions = ArrayReductions(self._meet, self._find_communicator)

    @abstractmethod
    def _find_communicator(self) -> Communicator:
        """Return the communicator of the group; raise if its members cannot meet."""

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all members, in their order, to every member.

        Parameters
        ----------
        value : object
            This member's value, such as a few numbers. It is pickled.
        """
        return self._meet("exchange", own=value)

    def barrier(self) -> None:
        """Wait until every member has called this method."""
        self._meet("barrier")

    def all_reduce(
        self, arrays: ArrayLike | Sequence[ArrayLike], op: ReduceOp = "avg", weight: float | None = None
    ) -> Any:
        """Return the reductions of the arrays of all members.

        Parameters
        ----------
        arrays : array-like, or list of these
            Arrays and numbers, of the same shapes and dtypes in every member. They are not changed.
        op : {"avg", "sum", "prod", "min", "max"}
            The operation.
        weight : float, optional
            This member's weight in ``"avg"``; by default 1.

        Returns
        -------
        numpy.ndarray or list of numpy.ndarray
            The reductions, equal to the last bit in all members.

        Raises
        ------
        SynkhronosError
            If the members are at different collectives, one that the others wait for has ended, or the
            number of members is not known.
        """
        is_list = isinstance(arrays, (list, tuple))
        given: Any = arrays if is_list else [arrays]
        reduced = self._reductions.all_reduce(given, op, weight)
        return reduced if is_list else reduced[0]

    def _meet(self, *called: Hashable, own: Any = None) -> list[Any]:
        """Wait for all members, which must call it with equal arguments; return each member's `own`."""
        group = self._find_communicator().group
        item = pickle.dumps((called, own), pickle.HIGHEST_PROTOCOL)
        by_member = [pickle.loads(each) for each in group.exchange(item)]
        if any(each[0] != called for each in by_member):
            plural, singular = self._names
            listed = "; ".join(
                f"{singular} {self._number_of(member)}: {each[0]}"
                for member, each in enumerate(by_member)
            )
            raise SynkhronosError(
                f"the {plural} are at different collectives: {listed}; let every {singular} call the "
                f"same ones in the same order, for the same arrays"
            )
        return [each[1] for each in by_member]

    def _number_of(self, member: int) -> int:
        """Return the number of a member in messages."""
        return member
