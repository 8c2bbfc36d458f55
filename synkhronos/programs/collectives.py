"""The collectives of a program: all ranks run the usual collectives' commands at the same point.

Ranks come to a collective by themselves, so each rank first tells the others which collective it is at.
So do processes that share memory but no transport: attached ones, and some of the ranks. All-reduces of
plain arrays are prepared once for arrays of a kind.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from abc import ABC, abstractmethod
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from synkhronos._errors import MissingRankError, SynkhronosError
from synkhronos._typing import AnyArray, ArrayLike, ReduceOp, SharedVariable, SharedVariables
from synkhronos.arithmetic.operations import Operation, find_operation
from synkhronos.arithmetic.partition import select
from synkhronos.comms.base import Communicator
from synkhronos.comms.formats import Format, check_format
from synkhronos.programs.stopping import Run, StopProgram
from synkhronos.services.registers import RegisterGroup
from synkhronos.variables.collectives import (
    Broadcast,
    Reduce,
    check_reducible,
    gather_replicas,
    join,
)
from synkhronos.variables.replicas import Assign, as_list, check_has_rows, check_tensors, conditioned
from synkhronos.world.call_lock import CallLock, takes_call_lock
from synkhronos.world.rank_state import Ask, Command, RankState

_MOST = 32  # kinds of arrays whose reductions are kept


def check_weight(operation: Operation, weight: float | None) -> None:
    """Raise unless a weight suits an operation."""
    if weight is not None and not operation.weighted:
        name = operation.name
        raise ValueError(f"weight: expected none for the operation {name!r}, which is not an average")
    if weight is not None and (not np.isfinite(weight) or weight < 0):
        raise ValueError(f"weight: expected a number of at least 0, got {weight!r}")


class GroupCollectives(ABC):
    """The collectives of a process, which is a member of a group."""

    #: What messages call the members, one of them, and the arguments of a collective
    _names = "attached processes", "process", "arrays"

    def __init__(self) -> None:
        # Every process calls it at the same point, so all of them drop the same reductions.
        self._prepare = functools.lru_cache(_MOST)(
            lambda op, *types: self._find_communicator().prepare_reduction(op)
        )

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
        reduced = self._reduce_arrays(given, op, weight)
        return reduced if is_list else reduced[0]

    def _reduce_arrays(
        self, given: Sequence[Any], op: ReduceOp, weight: float | None = None
    ) -> list[AnyArray]:
        """Return the reductions of arrays."""
        operation = find_operation(op)
        check_weight(operation, weight)
        arrays = [np.array(each, order="C") for each in given]
        for array in arrays:
            operation.check_dtype(array.dtype, "an array")
        kind = op, *(f"{each.dtype}{list(each.shape)}" for each in arrays)
        self._meet("all_reduce", *kind)
        reduced = self._prepare(*kind)(arrays, 1 if weight is None else weight)
        return [np.array(each) for each in reduced]  # as other processes will write to their memory

    def _meet(self, *called: Any, own: Any = None) -> list[Any]:
        """Wait for all members, which must call it with equal arguments; return each member's `own`.

        Raises
        ------
        SynkhronosError
            In every member, if the arguments differ: the members are at different points.
        """
        item = pickle.dumps((called, own), pickle.HIGHEST_PROTOCOL)
        exchange = self._find_communicator().group.exchange
        by_member = [pickle.loads(each) for each in exchange(item)]
        if any(there != called for there, _ in by_member):
            members, member, arguments = self._names
            listed = "; ".join(
                f"{member} {self._number_of(number)}: {name}({', '.join(map(str, what))})"
                for number, ((name, *what), _) in enumerate(by_member)
            )
            raise SynkhronosError(
                f"the {members} are at different collectives: {listed}; let every {member} call the "
                f"same ones in the same order, for the same {arguments}"
            )
        return [given for _, given in by_member]

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
    rank, size : int
        The number of this rank in the group, from 0 to ``size - 1``, and the number of its ranks.
    ranks : tuple of int
        The numbers of its ranks in the program.
    """

    _names = "ranks of a group", "rank", "arrays"

    def __init__(
        self, state: RankState, run: Run, turn: CallLock, ended: AnyArray, name: str, ranks: list[int]
    ) -> None:
        super().__init__()
        self.ranks, self.call_lock = tuple(ranks), turn
        self._engine, self._program, self._ended = state.engine, run, ended
        group = RegisterGroup(
            state.store.named_memory, self.ranks.index(state.rank), len(ranks), self._check, name
        )
        self._communicator = state.transport.near_communicator(group)
        self.rank, self.size = self._communicator.rank, self._communicator.size

    def __repr__(self) -> str:
        return f"<synkhronos.RankGroup {self.rank} of {self.size}, ranks {self.ranks}>"

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
        reduced = self._reduce_arrays([self._engine.export(each) for each in given], op, weight)
        for shared, value in zip(given, reduced):
            self._engine.write(shared, value)
        return None

    def _meet(self, *called: Any, own: Any = None) -> list[Any]:
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


class Collectives(GroupCollectives):
    """The part of `Rank` in which ranks meet.

    Parameters
    ----------
    state : RankState
        The state of this rank.
    run : Run
        This rank's run of the program.
    may_meet : bool
        Whether the program may use collectives.
    waits : bool
        Whether a call waits during a call of another thread of this rank.
    """

    _names = "ranks of the program", "rank", "variables"

    def __init__(self, state: RankState, run: Run, may_meet: bool, waits: bool) -> None:
        super().__init__()
        self._rank_state, self._program, self._stop, self.may_meet = state, run, run.stop, may_meet
        self.rank, self.size, self.device = state.rank, state.size, state.device
        self.is_master, self.master_rank = state.is_master, state.master_rank
        self.call_lock = CallLock(waits, run.check)
        self._numbers: dict[SharedVariable, int] = {}
        # Collectives of variables, which may be repeated
        self._prepared: dict[tuple[Any, ...], Callable[[Any], Any]] = {}

    # Variables

    @takes_call_lock
    def adopt(self, shared_vars: SharedVariables) -> None:
        """Let the collectives, centers and rules of this program use variables that it has made.

        Every rank adopts the variables of its own model, with the same shapes and dtypes in the same
        order. They keep their values: use `broadcast` or a center to begin with equal ones. Variables of
        the script's functions need not be adopted. It is a collective, unless the program runs with
        ``on_death="continue"``. After the program, they are variables of their rank only.

        Parameters
        ----------
        shared_vars : shared variable, or list of these

        Raises
        ------
        ValueError
            On every rank, if the shapes or dtypes differ.
        """
        self._enter()
        given = check_tensors(self._rank_state.engine, shared_vars)
        if self.may_meet:
            specs = [self._spec(shared) for shared in given]
            by_rank = self._meet("adopt", own=specs)
            if any(item != by_rank[0] for item in by_rank):
                listed = "; ".join(
                    f"rank {rank}: {', '.join(there)}" for rank, there in enumerate(by_rank)
                )
                raise ValueError(
                    f"rank.adopt: expected the same shapes and dtypes in the same order on every rank, "
                    f"got {listed}; build the same model on every rank"
                )
        self._rank_state.adopt([shared for shared in given if self._find(shared) is None])

    def _spec(self, shared: SharedVariable) -> str:
        """Describe what must be equal on all ranks."""
        storage, number = self._rank_state.engine.storage(shared), self._find(shared)
        known = "" if number is None else f" (variable {number})"
        return f"{storage.dtype}{list(storage.shape)}{known}"

    # Collectives

    @takes_call_lock
    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, on every rank.

        Parameters
        ----------
        value : object
            This rank's value, such as a few numbers. It is pickled.
        """
        self._enter_meeting()
        return self._meet("exchange", own=value)

    @takes_call_lock
    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        self._enter_meeting()
        self._meet("barrier")

    @takes_call_lock
    def broadcast(self, shared_vars: SharedVariables) -> None:
        """Set the replicas of every rank to the master's; see `synkhronos.broadcast`.

        Parameters
        ----------
        shared_vars : shared variable, or list of these
            The variables, the same on all ranks.
        """
        self._enter_meeting()
        numbers = self._numbers_of(shared_vars)
        self._run("broadcast", lambda: Broadcast(numbers, True), *numbers)

    @takes_call_lock
    def scatter(self, shared_vars: SharedVariables, values: Any = None) -> None:
        """Split rows of the master's `values` over the ranks; see `synkhronos.scatter`.

        Parameters
        ----------
        shared_vars : shared variable, or list of these
            The variables, the same on all ranks.
        values : array-like or Data, or list of these
            One value for each variable, in the master. Other ranks' values are ignored.
        """
        self._enter_meeting()
        numbers, state = self._numbers_of(shared_vars), self._rank_state
        arrays = None
        if state.is_master:
            if values is None:
                raise ValueError("rank.scatter: expected values in the master, got None")
            variables = [state.shareds[number] for number in numbers]
            given = as_list(shared_vars, values)
            arrays = [
                state.store.put(np.asarray(value))
                for value in conditioned(state.engine, variables, given, scattered=True)
            ]
        handles = self._meet("scatter", *numbers, own=arrays)[state.master_rank]
        Assign(numbers, handles, [select(None, handle.shape[0]) for handle in handles]).run(state)
        self._meet("end of scatter")  # the master's copies are needed up to this point

    @takes_call_lock
    def gather(self, shared_vars: SharedVariables, nd_up: int = 1) -> Any:
        """Return the replicas of all ranks in the master, None elsewhere; see `synkhronos.gather`.

        Parameters
        ----------
        shared_vars : shared variable, or list of these
            The variables, the same on all ranks.
        nd_up : {1, 0}
            Whether the values are stacked along a new axis 0 (1), or concatenated along axis 0 (0).
        """
        self._enter_meeting()
        if isinstance(nd_up, bool) or nd_up not in (0, 1):
            raise ValueError(f"rank.gather: nd_up: expected 0 or 1, got {nd_up!r}")
        numbers = self._numbers_of(shared_vars, nd_up == 0, "rank.gather(nd_up=0)")
        gathered = self._run(
            "gather", lambda: Ask(gather_replicas, numbers, False, True), *numbers, nd_up
        )
        if gathered is None:
            return None
        joined = [join(arrays, nd_up) for arrays in gathered]
        return joined if isinstance(shared_vars, (list, tuple)) else joined[0]

    @takes_call_lock
    def all_gather(self, shared_vars: SharedVariables) -> None:
        """Set every replica to all ranks' values along axis 0; see `synkhronos.all_gather`.

        Parameters
        ----------
        shared_vars : shared variable, or list of these
            The variables, the same on all ranks.
        """
        self._enter_meeting()
        numbers = self._numbers_of(shared_vars, True, "rank.all_gather")
        self._run("all_gather", lambda: Ask(gather_replicas, numbers, True, True), *numbers)

    @takes_call_lock
    def reduce(
        self,
        shared_vars: SharedVariables,
        op: ReduceOp = "avg",
        in_place: bool = True,
        weight: float | None = None,
    ) -> Any:
        """Reduce the replicas of all ranks in the master; see `synkhronos.reduce`.

        Parameters
        ----------
        shared_vars : shared variable, or list of these
            The variables, the same on all ranks.
        op : {"avg", "sum", "prod", "min", "max"}
            The operation.
        in_place : bool, default: True
            Whether the master's replica is set to the result. Otherwise it is returned in the master,
            and None elsewhere.
        weight : float, optional
            This rank's weight in ``"avg"``; by default 1.
        """
        self._enter_meeting()
        numbers = self._numbers_of(shared_vars)
        target = "master" if in_place else "new"
        reduced = self._reduce("reduce", numbers, op, target, weight)
        if reduced is None or isinstance(shared_vars, (list, tuple)):
            return reduced
        return reduced[0]

    @takes_call_lock
    def all_reduce(  # type: ignore[override]  # the name of its first argument
        self,
        shared_vars: SharedVariables | ArrayLike,
        op: ReduceOp = "avg",
        weight: float | None = None,
        wire: Format | None = None,
    ) -> Any:
        """Set the replicas of every rank to the reduction of all; see `synkhronos.all_reduce`.

        Parameters
        ----------
        shared_vars : shared variable, array, or list of these
            The variables, the same on all ranks. Or arrays and numbers, of the same shapes and dtypes on
            all ranks, which are not changed.
        op : {"avg", "sum", "prod", "min", "max"}
            The operation.
        weight : float, optional
            This rank's weight in ``"avg"``; by default 1.
        wire : {"float16", "bfloat16", "int8"}, PowerSGD or TopK, optional
            The format in which variables are sent between machines; the same on every rank.

        Returns
        -------
        numpy.ndarray, list of numpy.ndarray, or None
            The reductions of arrays; None for shared variables.
        """
        self._enter_meeting()
        is_list = isinstance(shared_vars, (list, tuple))
        given: Sequence[Any] = shared_vars if is_list else [shared_vars]  # type: ignore[assignment]
        if given and not any([self._rank_state.engine.is_shared(each) for each in given]):
            if wire is not None:
                raise ValueError(f"wire: expected None for arrays, got {wire!r}; use shared variables")
            with self._stopped_by_others():
                reduced = self._reduce_arrays(given, op, weight)
            return reduced if is_list else reduced[0]
        numbers = self._numbers_of(given)
        self._reduce("all_reduce", numbers, op, "all", weight, check_format(wire, op))

    def _reduce(
        self,
        name: str,
        numbers: Sequence[int],
        op: ReduceOp,
        target: str,
        weight: float | None,
        wire: Format | None = None,
    ) -> Any:
        operation = find_operation(op)
        variables = [self._rank_state.shareds[number] for number in numbers]
        check_reducible(self._rank_state.engine, operation, wire, variables)
        check_weight(operation, weight)
        weights = None if weight is None else {self.rank: float(weight)}
        what = *numbers, op, wire if target == "all" else target
        return self._run(
            name, lambda: Reduce(numbers, op, target, None, True, wire), *what, change=weights
        )

    def _run(
        self, name: str, make_command: Callable[[], Command], *what: Any, change: Any = None
    ) -> Any:
        """Run the command of a collective once all ranks have reached it, as `what` confirms."""
        self._meet(name, *what)
        key = (name, *what)
        run = self._prepared.get(key)
        if run is None:
            run = self._prepared[key] = make_command().bind(self._rank_state)
        with self._stopped_by_others():
            return run(change)

    def _meet(self, *called: Any, own: Any = None) -> list[Any]:
        self._before_meeting()
        with self._stopped_by_others():
            by_rank = super()._meet(*called, own=(self._stop.is_asked, own))
        self._stop.met(any(is_asked for is_asked, _ in by_rank))
        return [each for _, each in by_rank]

    def _find_communicator(self) -> Communicator:
        return self._rank_state.comm.over_cpu

    def _before_meeting(self) -> None:
        """Called before each meeting."""

    @contextlib.contextmanager
    def _stopped_by_others(self) -> Iterator[None]:
        try:
            yield
        except MissingRankError:
            if self._stop.is_asked:
                raise StopProgram from None
            raise

    # Internal

    def _enter(self) -> None:
        """Begin a method: end the program if it has to end."""
        self._program.enter()

    def _enter_meeting(self) -> None:
        self._enter()
        if not self.may_meet:
            raise RuntimeError(
                "a program with on_death='continue' cannot use collectives, as ranks that are left "
                "would wait for a dead one; use rank.center, send and receive, or ask"
            )

    def _numbers_of(
        self, shared_vars: SharedVariables, with_rows: bool = False, what: str = ""
    ) -> list[int]:
        given = check_tensors(self._rank_state.engine, shared_vars)
        numbers = [number for number in map(self._find, given) if number is not None]
        if len(numbers) < len(given):
            unknown = next(shared for shared in given if self._find(shared) is None)
            raise ValueError(
                f"shared_vars: {unknown} is not used by any function built with "
                f"synk.function(); if the program has made it, let every rank call rank.adopt() first"
            )
        if with_rows:
            check_has_rows(self._rank_state.engine, given, what)
        return numbers

    def _find(self, shared: SharedVariable) -> int | None:
        """Return the number of a shared variable, or None if the ranks do not know it."""
        if shared not in self._numbers:
            self._numbers = {each: number for number, each in self._rank_state.shareds.items()}
        return self._numbers.get(shared)
