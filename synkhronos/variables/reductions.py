"""The reduction of replicas: its command, and the check of its arguments."""

from __future__ import annotations

import dataclasses
from typing import (
    Any,
    Callable,
    Dict,
    Hashable,
    Mapping,
    Sequence,
    Tuple,
    Union,
)

import numpy as np

from synkhronos._checks import check_flag
from synkhronos._typing import ArrayLike, ReduceOp, SharedVariable, SharedVariables
from synkhronos.arithmetic.conversion import as_array
from synkhronos.arithmetic.operations import Operation, find_operation
from synkhronos.comms.formats import Format, check_arrays, check_format
from synkhronos.engines.base import Engine
from synkhronos.functions.function import Function
from synkhronos.functions.replicate import replicate
from synkhronos.variables.arguments import numbers_of, resolve
from synkhronos.world.rank_state import Command, RankState
from synkhronos.world.schedule import Schedule, ScheduledRun
from synkhronos.world.world import World, current_world

#: The weight of each rank, the number of a function, or None
Weights = Union[Sequence[float], Mapping[int, float], int, None]

_MOST_SCHEDULES = 32


@dataclasses.dataclass(eq=False, repr=False)
class Reduce(Command):
    """Reduce replicas into the master's replica, every rank's replica, or a new array on the master.

    Parameters
    ----------
    numbers : list of int
        The numbers of the variables.
    op : str
        The operation.
    target : {"all", "master", "new"}
        Where the result is written: every rank's replica, the master's, or a new array.
    weights : list of float, dict, int, or None
        Weights by rank (a program knows only its own), or the number of a function: each rank's row
        count in its last call.
    nccl : bool
        Whether NCCL may be used.
    wire : Format, optional
        The format in which the arrays are sent between machines, if the target is "all".
    begun : dict of int to int
        For variables by number: the number of the `Buckets` in which their reduction may have begun.
    """

    numbers: Sequence[int]
    op: str
    target: str
    weights: Weights
    nccl: bool
    wire: Format | None = None
    begun: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def is_like_serial(self) -> bool:  # type: ignore[override]  # a constant of most commands
        return self.target == "all"

    def exact(self) -> Reduce:
        return Reduce(self.numbers, self.op, self.target, self.weights, self.nccl)

    def changed(self, change: Weights) -> Reduce:
        """Return the same reduction with other weights."""
        return self if change is None else dataclasses.replace(self, weights=change)

    def bind(self, state: RankState) -> Callable[[Any], list[np.ndarray] | None]:
        comm = state.communicator(self.nccl)
        is_wired = self.wire is not None and comm.over_cpu.has_wires
        if is_wired:
            comm = comm.over_cpu
        reduce = comm.prepare_reduction(self.op, None if self.target == "all" else state.master_rank)
        function = self.weights if isinstance(self.weights, int) else None
        weight = 1 if self.weights is None or isinstance(self.weights, int) else self.weights[state.rank]

        def run(weights: Any) -> list[np.ndarray] | None:
            numbers = self.numbers
            if state.overlap is not None:
                numbers = [number for number in numbers if not _has_completed(state, self, number)]
                if not numbers:
                    return None
            arrays = state.storages(numbers)
            if self.target == "new" and state.is_master:
                arrays = [array.copy() for array in arrays]
            own: list[Any] = [weight if function is None else state.rows.get(function, 0)]
            if weights is not None:
                own = [weights[state.rank]]
            if is_wired:
                own.append(
                    [state.wire(item, self.wire, array.shape) for item, array in zip(numbers, arrays)]
                )
            reduced = reduce(arrays, *own)
            if self.target == "new" and state.is_master:
                return [np.array(state.engine.to_host(array)) for array in reduced]
            for number, former, array in zip(numbers, arrays, reduced):
                if array is not former:
                    state.engine.store(state.shareds[number], array)
            return None

        return run


# All-reduces of vectors that began while a function computed the vectors, which fills them in buckets.
# An all-reduce in the same command completes this if it requests the same reduction. Otherwise all ranks
# reduce their vectors as usual; the vectors still have the ranks' own values.


def _begun(
    engine: Engine, numbers: Sequence[int], variables: Sequence[SharedVariable]
) -> dict[int, int]:
    """Return which variables are filled in buckets: their numbers, and the numbers of the `Buckets`."""
    found = [(number, engine.buckets_of(shared)) for number, shared in zip(numbers, variables)]
    return {item: buckets.number for item, buckets in found if buckets is not None}


def _has_completed(state: RankState, command: Reduce, number: int) -> bool:
    """Complete the reduction of a variable for a `Reduce`, if it was begun; return whether it was.

    Only ranks that have an `OverlappedReduction` call this. The return value is the same on all of them.
    """
    if state.overlap.running is None or number not in command.begun:
        return False
    buckets, function, *_ = state.overlap.running
    wanted = command.begun[number], command.op, command.wire
    if (buckets.number, buckets.op, buckets.wire) != wanted:
        return False
    if find_operation(command.op).weighted and command.weights != function:
        return False
    state.overlap.finish(state.engine.storage(state.shareds[number]))
    return True


class _Reductions(Dict[Tuple[Hashable, ...], Tuple[Schedule, Sequence[int]]]):
    """The schedules of a world's reductions and the numbers of the variables, by the arguments.

    A function and variables are represented by their ids: a schedule is outdated when one is dropped.
    """


def plan_reduction(
    shared_vars: SharedVariables,
    op: ReduceOp,
    target: str,
    weights: Function | ArrayLike | None,
    nccl: bool,
    wire: Format | None = None,
) -> tuple[World, list[SharedVariable], Sequence[int], Command]:
    """Return the world, the variables, their numbers and the command, after checking the arguments."""
    world = current_world()
    objects = list(shared_vars) if isinstance(shared_vars, (list, tuple)) else [shared_vars]
    known, key = world.part(_Reductions), None
    if wire is not None and type(op) is str:  # another type is refused below
        wire = check_format(wire, op)
    if (weights is None or isinstance(weights, Function)) and type(op) is str and type(nccl) is bool:
        key = op, target, nccl, wire, *map(id, [*objects, weights])
        schedule, numbers = known.get(key, (None, []))
        run = None if schedule is None else schedule.again()
        if run is not None:
            return world, objects, numbers, run
    _, variables, _ = resolve(shared_vars)
    operation, numbers = find_operation(op), numbers_of(world, variables)
    engine = world.rank_state.engine
    weighed, nccl = _check_weights(world, operation, weights), check_flag(nccl, "nccl")
    started = _begun(engine, numbers, variables) if target == "all" else {}
    check_reducible(engine, operation, wire, variables)
    command: Command = Reduce(numbers, op, target, weighed, nccl, wire, started)
    if key is not None:
        if len(known) >= _MOST_SCHEDULES:
            known.clear()
        schedule = Schedule(world, command)
        known[key], command = (schedule, numbers), ScheduledRun(schedule)
    replicate(world)
    return world, variables, numbers, command


def check_reducible(
    engine: Engine, operation: Operation, wire: Format | None, variables: Sequence[SharedVariable]
) -> None:
    """Raise if shared variables cannot be reduced by an operation, or not be sent in a wire format."""
    for variable in variables:
        operation.check_dtype(engine.type_of(variable).dtype, variable)
    if wire is not None:
        arrays = [engine.storage(variable) for variable in variables]
        check_arrays(wire, variables, arrays, [engine.pieces_of(variable) for variable in variables])


def _check_weights(
    world: World, operation: Operation, weights: Function | ArrayLike | None
) -> list[float] | int | None:
    if weights is None:
        return None
    if not operation.weighted:
        raise ValueError(
            f"weights: expected none for the operation {operation.name!r}, which is not an average; "
            f"leave them out, or use 'avg'"
        )
    if isinstance(weights, Function):
        if (number := world.registry.number_of(weights)) is None:
            raise ValueError(f"weights: {weights!r} is not a function of this world")
        return number
    numbers = as_array(weights, None, "weights")
    fitting = numbers.shape == (world.size,) and numbers.dtype.kind != "c"
    if not fitting or not np.isfinite(numbers).all() or min(numbers) < 0 or not any(numbers):
        raise ValueError(
            f"weights: expected {world.size} numbers, one per rank, none negative and not all zero, "
            f"got {weights}"  # type: ignore[str-bytes-safe]  # bytes are no numbers
        )
    listed: list[float] = numbers.tolist()
    return listed
