"""Collectives on shared variables: each function with its command."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Dict, Hashable, Literal, Mapping, Sequence, Tuple, Union, overload

import numpy as np

from synkhronos._checks import check_flag
from synkhronos._errors import MismatchError
from synkhronos._text import listed
from synkhronos._typing import (
    AnyArray,
    ArrayLike,
    ComputedArray,
    ComputedList,
    ReduceOp,
    SharedVariable,
    SharedVariables,
    Values,
)
from synkhronos.arithmetic.comparison import difference
from synkhronos.arithmetic.conversion import as_array
from synkhronos.arithmetic.operations import Operation, find_operation
from synkhronos.comms.formats import Format, check_arrays, check_format
from synkhronos.engines.base import Engine
from synkhronos.functions.function import Function
from synkhronos.functions.replica_tracker import (
    ReplicaTracker,
    expected_equal,
    find_different,
    label,
    replica_tracker_of,
)
from synkhronos.variables.replicas import (
    as_list,
    assign,
    check_has_rows,
    conditioned,
    numbers_of,
    resolve,
)
from synkhronos.world.rank_state import Ask, Command, RankState
from synkhronos.world.schedule import Pending, Schedule, ScheduledRun
from synkhronos.world.world import World, current_world, with_call_lock

#: The weight of each rank, the number of a function, or None
Weights = Union[Sequence[float], Mapping[int, float], int, None]

_MOST_SCHEDULES = 32


def _submit_equalizing(
    world: World, command: Command, numbers: Sequence[int], variables: Sequence[SharedVariable]
) -> Pending | None:
    """Run or record a collective after which the replicas of its variables are equal."""
    tracker = world.part(ReplicaTracker)
    if world.recorder is None:
        tracker.equalized(numbers, world.run(command))
        return None
    if world.is_recording:
        tracker.equalized(numbers)  # for the next calls of the block
    note = functools.partial(tracker.equalized, numbers)
    pending: Pending | None = world.submit(command, note, variables)
    return pending


class Broadcast(Command):
    """Set every rank's replicas to the master's."""

    is_like_serial = takes_master = True

    def __init__(self, numbers: Sequence[int], nccl: bool) -> None:
        self.numbers, self.nccl = numbers, nccl

    def bind(self, state: RankState) -> Callable[[Any], None]:
        broadcast = state.communicator(self.nccl).prepare_broadcast(state.master_rank)

        def run(_: Any) -> None:
            values = broadcast(state.storages(self.numbers))
            for number, value in zip(self.numbers, values):
                state.engine.store(state.shareds[number], value)

        return run


@with_call_lock
def broadcast(
    shared_vars: SharedVariables, values: Values | None = None, nccl: bool = True
) -> Pending | None:
    """Set the replicas of every rank to the master's value, or to `values`.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
        Functions may use them, now or later, but do not have to. Before the workers are started, only
        the master's value is set, which they will have as well.
    values : array-like or Data, or list of these, optional
        One value for each variable, of its ndim and of a dtype that can be cast safely to its dtype.
        By default the master's values are sent.
    nccl : bool, default: True
        Whether NCCL may be used. It has no effect on the CPU.

    Raises
    ------
    TypeError
        If a variable is not a shared tensor, a value has the wrong ndim or cannot be cast safely, or
        `nccl` is not a bool.
    ValueError
        If a variable is given twice, or the number of values is wrong.
    MemoryError
        If there is too little shared memory for `values`.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> synk.fork(2, use_gpu=False)
    2
    >>> rate = theano.shared(0.5, name="rate")
    >>> f = synk.function([], rate)  # the mean over the ranks
    >>> synk.distribute()
    >>> synk.broadcast(rate, 0.25)
    >>> f()
    array(0.25)
    >>> rate.set_value(0.125)  # the master's replica only
    >>> synk.broadcast(rate)
    >>> f()
    array(0.125)
    >>> synk.close()
    """
    world, variables, _ = resolve(shared_vars, unused_too=True)
    nccl = check_flag(nccl, "nccl")
    arrays = None
    if values is not None:
        arrays = conditioned(world.rank_state.engine, variables, as_list(shared_vars, values))
    if not world.started and not world.is_recording:  # the workers will have the master's values
        for variable in variables:
            world.registry.add_shared(variable)
        for variable, array in zip(variables, arrays or ()):
            world.rank_state.engine.write(variable, np.asarray(array))
        return None
    numbers = numbers_of(world, variables)
    if arrays is not None:
        replica_tracker_of(world).equalized(numbers)
        return assign(world, variables, arrays)
    replica_tracker_of(world).changed.difference_update(numbers)  # it is sent by this command
    return _submit_equalizing(world, Broadcast(numbers, nccl), numbers, variables)


def gather_replicas(
    state: RankState, numbers: Sequence[int], to_all: bool, nccl: bool
) -> list[list[AnyArray]] | None:
    """Return all replicas to the master, or concatenate them along axis 0 on every rank."""
    comm, own = state.communicator(nccl), state.storages(numbers)
    if not to_all:
        return comm.gather(own, state.master_rank)
    for number, arrays in zip(numbers, comm.all_gather(own)):
        state.engine.store(state.shareds[number], state.engine.arithmetic.concatenate(arrays))
    return None


@overload
def gather(
    shared_vars: Sequence[SharedVariable], nd_up: Literal[0, 1] = ..., nccl: bool = ...
) -> ComputedList[Any]: ...


@overload
def gather(shared_vars: SharedVariable, nd_up: Literal[0], nccl: bool = ...) -> ComputedArray: ...


@overload
def gather(shared_vars: SharedVariable, nd_up: Literal[1] = ..., nccl: bool = ...) -> Any: ...


@with_call_lock
def gather(shared_vars: SharedVariables, nd_up: Literal[0, 1] = 1, nccl: bool = True) -> Any:
    """Return the replicas of all ranks.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
        Each must be used by a function built with `function`.
    nd_up : {1, 0}
        Whether the values are stacked along a new axis 0 (1), or concatenated along axis 0 (0), in the
        order of the ranks.
    nccl : bool, default: True
        Whether NCCL may be used. It has no effect on the CPU.

    Returns
    -------
    numpy.ndarray, or list of these
        The values, in the dtype of the variable. With ``nd_up=1`` the shape is ``(n, *shape)`` for `n`
        ranks; if the ranks' shapes differ, the result is a list of arrays by rank instead. With
        ``nd_up=0`` it is ``(sum of rows, ...)``: the ranks' lengths of axis 0 are added, and all other
        axes must be equal. If `shared_vars` is a list, the result is a list with such an item for
        each variable.

    Raises
    ------
    TypeError
        If a variable is not a shared tensor, or `nccl` is not a bool.
    ValueError
        If no function uses a variable, a variable is given twice, `nd_up` is neither 0 nor 1, or with
        ``nd_up=0`` if a variable has no axis 0 or the shapes differ in other axes.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> synk.fork(2, use_gpu=False)
    2
    >>> w = theano.shared(np.zeros(3), name="w")
    >>> f = synk.function([], w.sum())
    >>> synk.set_value(1, w, np.ones(3))
    >>> synk.gather(w)
    array([[0., 0., 0.],
           [1., 1., 1.]])
    >>> synk.gather(w, nd_up=0)
    array([0., 0., 0., 1., 1., 1.])
    >>> synk.close()
    """
    world, variables, single = resolve(shared_vars)
    if isinstance(nd_up, bool) or nd_up not in (0, 1):
        raise ValueError(f"gather: nd_up: expected 0 or 1, got {nd_up!r}")
    if nd_up == 0:
        check_has_rows(world.rank_state.engine, variables, "gather(nd_up=0)")

    def finish(results: Sequence[Any]) -> Any:
        joined = [join(arrays, nd_up) for arrays in results[world.master_rank]]
        return joined[0] if single else joined

    nccl, numbers = check_flag(nccl, "nccl"), numbers_of(world, variables)
    replica_tracker_of(world).compared(numbers)
    return world.submit(Ask(gather_replicas, numbers, False, nccl), finish, variables)


def join(arrays: list[AnyArray], nd_up: int) -> Any:
    """Return the result of `gather` for the values of a variable by rank."""
    if nd_up == 0:
        if len({array.shape[1:] for array in arrays}) > 1:
            raise ValueError(
                f"gather(nd_up=0): expected shapes that are equal except for axis 0, got "
                f"{[array.shape for array in arrays]} by rank; use nd_up=1 to get a list"
            )
        return np.concatenate(arrays)
    if len({array.shape for array in arrays}) > 1:
        return arrays
    return np.stack(arrays)


@with_call_lock
def all_gather(shared_vars: SharedVariables, nccl: bool = True) -> Pending | None:
    """Set every rank's replica to all ranks' values, concatenated along axis 0.

    The new shape is ``(sum of rows, ...)`` on every rank: the ranks' lengths of axis 0 are added, and
    all other axes must be equal.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
        Each must be used by a function built with `function`.
    nccl : bool, default: True
        Whether NCCL may be used. It has no effect on the CPU.

    Raises
    ------
    TypeError
        If a variable is not a shared tensor, or `nccl` is not a bool.
    ValueError
        If no function uses a variable, a variable is given twice, it has no axis 0, its type allows one
        row only, or the replicas' shapes differ in other axes.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> synk.fork(2, use_gpu=False)
    2
    >>> rows = theano.shared(np.zeros((1, 2)), name="rows")
    >>> f = synk.function([], rows.sum())
    >>> synk.set_value(1, rows, np.ones((2, 2)))
    >>> synk.all_gather(rows)
    >>> synk.get_value(1, rows)
    array([[0., 0.],
           [1., 1.],
           [1., 1.]])
    >>> synk.close()
    """
    world, variables, _ = resolve(shared_vars)
    check_has_rows(world.rank_state.engine, variables, "all_gather")
    for variable in variables:
        extent = world.rank_state.engine.type_of(variable).extents[0]
        if extent is not None:
            raise ValueError(f"all_gather: {variable} has extent {extent} on axis 0 by its type")
    nccl, numbers = check_flag(nccl, "nccl"), numbers_of(world, variables)
    return _submit_equalizing(world, Ask(gather_replicas, numbers, True, nccl), numbers, variables)


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

    def bind(self, state: RankState) -> Callable[[Any], list[AnyArray] | None]:
        comm = state.communicator(self.nccl)
        is_wired = self.wire is not None and comm.over_cpu.has_wires
        if is_wired:
            comm = comm.over_cpu
        reduce = comm.prepare_reduction(self.op, None if self.target == "all" else state.master_rank)
        function = self.weights if isinstance(self.weights, int) else None
        weight = 1 if self.weights is None or isinstance(self.weights, int) else self.weights[state.rank]

        def run(weights: Any) -> list[AnyArray] | None:
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
    operation, engine = find_operation(op), world.rank_state.engine
    weighed, nccl = _check_weights(world, operation, weights), check_flag(nccl, "nccl")
    check_reducible(engine, operation, wire, variables)
    numbers = numbers_of(world, variables)
    begun: dict[int, int] = {}
    for number, shared in zip(numbers, variables) if target == "all" else ():
        if (buckets := engine.buckets_of(shared)) is not None:
            begun[number] = buckets.number
    command: Command = Reduce(numbers, op, target, weighed, nccl, wire, begun)
    if key is not None:
        if len(known) >= _MOST_SCHEDULES:
            known.clear()
        schedule = Schedule(world, command)
        known[key], command = (schedule, numbers), ScheduledRun(schedule)
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


@overload
def reduce(
    shared_vars: SharedVariables,
    op: ReduceOp = ...,
    in_place: Literal[True] = ...,
    nccl: bool = ...,
    *,
    weights: Function | ArrayLike | None = ...,
) -> Pending | None: ...


@overload
def reduce(
    shared_vars: Sequence[SharedVariable],
    op: ReduceOp = ...,
    in_place: bool = ...,
    nccl: bool = ...,
    *,
    weights: Function | ArrayLike | None = ...,
) -> ComputedList[AnyArray]: ...


@overload
def reduce(
    shared_vars: SharedVariable,
    op: ReduceOp = ...,
    in_place: bool = ...,
    nccl: bool = ...,
    *,
    weights: Function | ArrayLike | None = ...,
) -> ComputedArray: ...


@with_call_lock
def reduce(
    shared_vars: SharedVariables,
    op: ReduceOp = "avg",
    in_place: bool = True,
    nccl: bool = True,
    *,
    weights: Function | ArrayLike | None = None,
) -> Any:
    """Reduce the replicas of all ranks to one value on the master.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
        Each must be used by a function built with `function`.
    op : {"avg", "sum", "prod", "min", "max"}
        How the values are combined; ``"avg"``, the default, is weighted by `weights`.
    in_place : bool, default: True
        Whether the master's replica is set to the result. Otherwise the result is returned.
    nccl : bool, default: True
        Whether NCCL may be used. It has no effect on the CPU.
    weights : Function, or sequence of float, optional
        Weights for ``"avg"``: one number per rank, or a function, for the number of rows that each rank
        had in its last call.

    Returns
    -------
    None, or numpy.ndarray or list of these if not `in_place`
        The result, in the shape and dtype of the variable.

    Raises
    ------
    TypeError
        If a variable is not a shared tensor, the operation is not defined for its dtype, such as
        ``"avg"`` of integers, `nccl` is not a bool, or the weights are not numbers.
    ValueError
        If the ranks' shapes differ, the operation does not exist, no function uses a variable, the
        weights are negative, all zero or not one per rank, or `weights` is given for an operation other
        than ``"avg"``.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> synk.fork(2, use_gpu=False)
    2
    >>> w = theano.shared(np.ones(2), name="w")
    >>> f = synk.function([], w.sum())
    >>> synk.set_value(1, w, np.array([3.0, 5.0]))
    >>> synk.reduce(w, "max", in_place=False)
    array([3., 5.])
    >>> synk.reduce(w, weights=[3, 1])
    >>> w.get_value()
    array([1.5, 2. ])
    >>> synk.close()
    """
    target = "master" if in_place else "new"
    world, variables, numbers, command = plan_reduction(shared_vars, op, target, weights, nccl)
    replica_tracker_of(world).compared(numbers)
    if in_place:
        replica_tracker_of(world).local.update(numbers)

    def finish(results: Sequence[Any]) -> Any:
        if in_place:
            return None
        reduced = results[world.master_rank]
        return reduced if isinstance(shared_vars, (list, tuple)) else reduced[0]

    return world.submit(command, finish, variables)


@with_call_lock
def all_reduce(
    shared_vars: SharedVariables,
    op: ReduceOp = "avg",
    nccl: bool = True,
    *,
    weights: Function | ArrayLike | None = None,
    wire: Format | None = None,
) -> Pending | None:
    """Set the replicas of every rank to the reduction of all ranks' values.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
        Each must be used by a function built with `function`.
    op : {"avg", "sum", "prod", "min", "max"}
        How the values are combined; ``"avg"``, the default, is weighted by `weights`.
    nccl : bool, default: True
        Whether NCCL may be used. It has no effect on the CPU.
    weights : Function, or sequence of float, optional
        Weights for ``"avg"``: one number per rank, or a function, for the number of rows that each rank
        had in its last call. The average is then exact for batches that do not divide evenly.
    wire : {"float16", "bfloat16", "int8"}, PowerSGD or TopK, optional
        The format in which arrays are sent between machines, for ``"avg"`` and ``"sum"`` of float32, so
        that they take fewer bytes; by default they are sent unchanged. Arrays of at most 64 kB are
        always sent unchanged. It has no effect within a machine, and therefore none on a single
        machine. ``"int8"``, `PowerSGD` and `TopK` keep the part that they leave out and add it to the
        next reduction of the variable in the same format.

    Raises
    ------
    TypeError
        If a variable is not a shared tensor, the operation is not defined for its dtype, such as
        ``"avg"`` of integers, `nccl` is not a bool, the weights are not numbers, or `wire` has the
        wrong type.
    ValueError
        If the ranks' shapes differ, the operation does not exist, no function uses a variable, the
        weights are negative, all zero or not one per rank, `weights` is given for an operation other
        than ``"avg"``, or `wire` is not the name of a format or cannot be used for the operation or
        the variables.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> synk.fork(2, use_gpu=False)
    2
    >>> w = theano.shared(np.ones(2), name="w")
    >>> f = synk.function([], w.sum())
    >>> synk.set_value(1, w, np.array([3.0, 5.0]))
    >>> synk.all_reduce(w)
    >>> synk.get_value(1, w)
    array([2., 3.])
    >>> synk.close()
    """
    world, variables, numbers, command = plan_reduction(shared_vars, op, "all", weights, nccl, wire)
    return _submit_equalizing(world, command, numbers, variables)


_MOST_MEASURED = 10  # variables whose values are fetched, too
_MOST_LISTED = 20  # variables in the message


@with_call_lock
def in_sync(shared_vars: SharedVariables | None = None) -> bool:
    """Check that all ranks have the same values of shared variables, bit for bit.

    Each rank sends digests of its replicas, so little data is transferred, regardless of their size.

    Parameters
    ----------
    shared_vars : shared variable, or list of these, optional
        Each must be used by a function built with `function`. By default all such variables, except the
        states of random streams, and variables that hold each rank's own rows because they were
        scattered or are sliceable.

    Returns
    -------
    bool
        True. Before the workers are started, there are no replicas that could differ.

    Raises
    ------
    MismatchError
        If replicas differ. It names the variables, the ranks that differ from the master, and by how
        much.
    TypeError
        If a variable is not a shared tensor.
    ValueError
        If no function uses a variable, or a variable is given twice.
    RuntimeError
        Inside a ``fuse()`` block.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> synk.fork(2, use_gpu=False)
    2
    >>> w = theano.shared(np.zeros(3), name="w")
    >>> f = synk.function([], w.mean())
    >>> synk.distribute()
    >>> synk.in_sync()
    True
    >>> w.set_value(np.ones(3))  # the master's replica only
    >>> try:
    ...     synk.in_sync(w)
    ... except synk.MismatchError as error:
    ...     print(error)
    replicas that differ from the master's (make them equal with synk.broadcast() or synk.all_reduce()):
    - w: rank 1, by up to 1 (1 of the largest value)
    >>> synk.broadcast(w)
    >>> synk.in_sync(w)
    True
    >>> synk.close()
    """
    world = current_world()
    world.check_usable()
    if world.is_recording:
        raise RuntimeError("in_sync(): not inside a fuse() block; call it after the block")
    if shared_vars is None:
        numbers = expected_equal(world)
    else:
        _, variables, _ = resolve(shared_vars)
        replicated = world.registry.replicated
        numbers = [world.registry.numbers[item] for item in variables]
        numbers = [item for item in numbers if item < replicated]
    # Python's collector may run before they are compared.
    kept = [world.rank_state.shareds[item] for item in numbers]
    if not world.started or world.size == 1 or not numbers:
        return True
    found = find_different(world, numbers)
    del kept
    if not found:
        return True
    names = [label(world, number) for number in found]
    lines: list[str] = []
    for name, (number, ranks) in zip(names[:_MOST_LISTED], found.items()):
        line = f"- {listed([name])}: rank {listed(ranks)}"
        if len(lines) < _MOST_MEASURED:
            line += f", {_amount(world, number)}"
        lines.append(line)
    if len(names) > _MOST_LISTED:
        lines.append(f"- {len(names) - _MOST_LISTED} more")
    raise MismatchError(
        "replicas that differ from the master's (make them equal with synk.broadcast() or "
        "synk.all_reduce()):\n" + "\n".join(lines),
        names,
    )


def _amount(world: World, number: int) -> str:
    """Return by how much replicas differ from the master's."""
    [arrays] = world.run(Ask(gather_replicas, [number], False, False))[world.master_rank]
    own = arrays[world.master_rank]
    if any(array.shape != own.shape for array in arrays):
        return f"in their shapes: {[array.shape for array in arrays]} by rank"
    return str(max(difference(array, own) for array in arrays))
