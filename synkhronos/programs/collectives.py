"""The collectives of a program: all ranks run the usual collectives' commands at the same point.

Ranks come to a collective by themselves, so each rank first tells the others which collective it is at.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Hashable, Iterator, Sequence

import numpy as np

from synkhronos._errors import MissingRankError
from synkhronos._typing import ArrayLike, ReduceOp, SharedVariable, SharedVariables
from synkhronos.arithmetic.operations import find_operation
from synkhronos.arithmetic.partition import select
from synkhronos.comms.formats import Format, check_format
from synkhronos.programs.group_collectives import ArrayReductions, check_weight, meet
from synkhronos.programs.stopping import Run, StopProgram
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


class Collectives:
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

    def __init__(self, state: RankState, run: Run, may_meet: bool, waits: bool) -> None:
        self._rank_state, self._program, self._stop, self._may_meet = state, run, run.stop, may_meet
        self.call_lock = CallLock(waits, run.check)
        self._numbers: dict[SharedVariable, int] = {}
        # Collectives of variables, which may be repeated
        self._prepared: dict[tuple[Any, ...], Callable[[Any], Any]] = {}
        self._array_reductions = ArrayReductions(self._meet, lambda: self._rank_state.comm.over_cpu)

    @property
    def rank(self) -> int:
        """The number of this rank, from 0 to ``size - 1``."""
        return self._rank_state.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._rank_state.size

    @property
    def is_master(self) -> bool:
        """Whether this rank is the process of the script."""
        return self._rank_state.is_master

    @property
    def master_rank(self) -> int:
        """The rank of the process of the script."""
        return self._rank_state.master_rank

    @property
    def device(self) -> str:
        """The name of the rank's device, such as ``"cpu"`` or ``"cuda0"``."""
        return self._rank_state.device

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
        if self._may_meet:
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

    @property
    def may_meet(self) -> bool:
        """Whether the program may use collectives; False with ``on_death="continue"``."""
        return self._may_meet

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
    def all_reduce(
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
                reduced = self._array_reductions.all_reduce(given, op, weight)
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

    def _meet(self, name: str, *what: Hashable, own: Any = None) -> list[Any]:
        """Wait for all ranks, which must call it with equal arguments; return each rank's `own`.

        Raises
        ------
        SynkhronosError
            On every rank, if the arguments differ: the ranks are at different points of the program.
        """
        self._before_meeting()
        names = "ranks of the program", "rank", "variables"
        with self._stopped_by_others():
            exchange = self._rank_state.transport.exchange
            by_rank = meet(exchange, (name, *what), (self._stop.is_asked, own), names)
        self._stop.met(any(is_asked for is_asked, _ in by_rank))
        return [each for _, each in by_rank]

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
        if not self._may_meet:
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
