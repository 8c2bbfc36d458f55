"""`RankGroup`: some of the ranks of a program, which have collectives of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Hashable, Sequence

from synkhronos._errors import SynkhronosError
from synkhronos._typing import ArrayLike, ReduceOp, SharedVariables
from synkhronos.comms.base import Communicator
from synkhronos.programs.group_collectives import GroupCollectives
from synkhronos.programs.stopping import Run, StopProgram
from synkhronos.services.register_group import RegisterGroup
from synkhronos.world.call_lock import CallLock, takes_call_lock
from synkhronos.world.rank_state import RankState

if TYPE_CHECKING:
    import numpy as np


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
