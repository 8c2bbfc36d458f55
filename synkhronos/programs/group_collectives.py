"""Collectives of processes that share memory but no transport: attached ones, and some of the ranks.

Processes come to a collective by themselves, so each first tells the others which collective it is at.
All-reduces of plain arrays are prepared once for arrays of a kind, also those of all ranks.
"""

from __future__ import annotations

import functools
import pickle
from abc import ABC, abstractmethod
from typing import Any, Callable, Hashable, Sequence

import numpy as np

from synkhronos._errors import SynkhronosError
from synkhronos._typing import AnyArray, ArrayLike, ReduceOp, SharedVariables
from synkhronos.arithmetic.operations import Operation, find_operation
from synkhronos.comms.base import Communicator, Reduction
from synkhronos.programs.stopping import Run, StopProgram
from synkhronos.services.registers import RegisterGroup
from synkhronos.world.call_lock import CallLock, takes_call_lock
from synkhronos.world.rank_state import RankState

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
        self._meet = meet

        # Every process calls it at the same point, so all of them drop the same reductions.
        @functools.lru_cache(_MOST)
        def prepare(op: ReduceOp, *types: str) -> Reduction:
            return find_communicator().prepare_reduction(op)

        self._prepare = prepare

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
        reduced = self._prepare(*kind)(arrays, 1 if weight is None else weight)
        return [np.array(each) for each in reduced]  # as other processes will write to their memory

    def clear(self) -> None:
        """Free what is kept."""
        self._prepare.cache_clear()


def check_weight(operation: Operation, weight: float | None) -> None:
    """Raise unless a weight suits an operation."""
    if weight is not None and not operation.weighted:
        name = operation.name
        raise ValueError(f"weight: expected none for the operation {name!r}, which is not an average")
    if weight is not None and (not np.isfinite(weight) or weight < 0):
        raise ValueError(f"weight: expected a number of at least 0, got {weight!r}")


def meet(
    exchange: Callable[[bytes], list[bytes]],
    called: tuple[Any, ...],
    own: Any,
    names: tuple[str, str, str],
    number_of: Callable[[int], int] = lambda member: member,
) -> list[Any]:
    """Return what each member gives, once all have come to a collective.

    Parameters
    ----------
    exchange : callable
        Returns the bytes that each member gives it.
    called : tuple
        The name of the collective and its arguments, which must be equal.
    own : object
        What this member gives.
    names : tuple of str
        What messages call the members, one of them, and the arguments.
    number_of : callable, optional
        Returns the number of a member in messages.
    """
    item = pickle.dumps((called, own), pickle.HIGHEST_PROTOCOL)
    by_member = [pickle.loads(each) for each in exchange(item)]
    if any(there != called for there, _ in by_member):
        members, member, arguments = names
        listed = "; ".join(
            f"{member} {number_of(number)}: {name}({', '.join(map(str, what))})"
            for number, ((name, *what), _) in enumerate(by_member)
        )
        raise SynkhronosError(
            f"the {members} are at different collectives: {listed}; let every {member} call the same "
            f"ones in the same order, for the same {arguments}"
        )
    return [given for _, given in by_member]


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
        group, names = self._find_communicator().group, (*self._names, "arrays")
        return meet(group.exchange, called, own, names, self._number_of)

    def _number_of(self, member: int) -> int:
        """Return the number of a member in messages."""
        return member


class RankGroup(GroupCollectives):
    """Some of the ranks of a program. `Rank.split` returns it.

    Its collectives wait for the ranks of the group only.

    Parameters
    ----------
    state : RankState
        The state of this rank.
    run : Run
        This rank's run of the program.
    call_lock : CallLock
        The turn that calls of this rank take.
    ended : numpy.ndarray
        For each rank of the program, whether it has ended.
    name : str
        The name by which the ranks of the group know its memory.
    ranks : list of int
        The numbers of its ranks in the program, in the order of the group.

    Attributes
    ----------
    ranks : tuple of int
        The numbers of its ranks in the program.
    """

    _names = "ranks of a group", "rank"

    def __init__(
        self,
        state: RankState,
        run: Run,
        turn: CallLock,
        ended: np.ndarray,
        name: str,
        ranks: Sequence[int],
    ) -> None:
        super().__init__()
        self.ranks, self.call_lock = tuple(ranks), turn
        self._engine, self._program, self._ended = state.engine, run, ended
        group = RegisterGroup(
            state.store.named_memory, self.ranks.index(state.rank), len(ranks), self._check, name
        )
        self._communicator = state.transport.near_communicator(group)

    def __repr__(self) -> str:
        return f"<synkhronos.RankGroup {self.rank} of {self.size}, ranks {self.ranks}>"

    @property
    def rank(self) -> int:
        """The number of this rank in the group, from 0 to ``size - 1``."""
        return self._communicator.rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return self._communicator.size

    @takes_call_lock
    def all_reduce(
        self,
        arrays: SharedVariables | ArrayLike | Sequence[ArrayLike],
        op: ReduceOp = "avg",
        weight: float | None = None,
    ) -> Any:
        """Set variables of the group's ranks to the reductions of them, or return those of arrays.

        Parameters
        ----------
        arrays : shared variable, array-like, or list of these
            Variables of this rank, of the same shapes and dtypes on every rank of the group. Or arrays
            and numbers, which are not changed.
        op : {"avg", "sum", "prod", "min", "max"}
            The operation.
        weight : float, optional
            This rank's weight in ``"avg"``; by default 1.

        Returns
        -------
        numpy.ndarray, list of numpy.ndarray, or None
            The reductions of arrays; None for shared variables.

        Raises
        ------
        SynkhronosError
            If the ranks are at different collectives, or one that the others wait for has ended.
        """
        self._program.enter()
        given: Any = arrays if isinstance(arrays, (list, tuple)) else [arrays]
        are_shared = [self._engine.is_shared(each) for each in given]
        if not any(are_shared):
            return super().all_reduce(arrays, op, weight)  # type: ignore[arg-type]  # none is a variable
        if not all(are_shared):
            raise TypeError(f"all_reduce: expected shared variables or arrays, got both: {given}")
        reduced = self._reductions.all_reduce([self._engine.export(each) for each in given], op, weight)
        for shared, value in zip(given, reduced):
            self._engine.write(shared, value)
        return None

    def _meet(self, *called: Hashable, own: Any = None) -> list[Any]:
        with self.call_lock:
            self._program.enter()
            stop = self._program.stop
            by_member = super()._meet(*called, own=(stop.is_asked, own))
            stop.met(any(is_asked for is_asked, _ in by_member))
        return [each for _, each in by_member]

    def _find_communicator(self) -> Communicator:
        return self._communicator

    def _number_of(self, member: int) -> int:
        return self.ranks[member]

    def _check(self, member: int) -> None:
        """Raise if the program has to end, or a rank of the group will not come any more."""
        self._program.pause(0)
        if self._ended[self.ranks[member]]:
            if self._program.stop.is_asked:
                raise StopProgram
            raise SynkhronosError(
                f"rank {self.ranks[member]} has ended its program, and others of its group wait for it "
                f"in a collective; let every rank of a group call the same collectives"
            )
