"""Collectives of processes that share memory but no transport: attached ones, and some of the ranks.

Processes come to a collective by themselves, so each first tells the others which collective it is at.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from typing import Any, Hashable, Sequence

from synkhronos._errors import SynkhronosError
from synkhronos._typing import ArrayLike, ReduceOp
from synkhronos.comms.base import Communicator
from synkhronos.programs.array_reductions import ArrayReductions


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
