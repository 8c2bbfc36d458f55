"""Checks the shared variables in a call, and converts them to the numbers that the ranks use."""

from __future__ import annotations

import functools
from typing import Any, Sequence

import numpy as np

from synkhronos._checks import check_int
from synkhronos._text import shortened
from synkhronos._typing import Finish, SharedVariable, SharedVariables, Values
from synkhronos.arithmetic.conversion import condition, in_order_of
from synkhronos.arrays.data import Data
from synkhronos.engines.base import Engine, dims_of
from synkhronos.functions.replica_tracker import replica_tracker_of
from synkhronos.functions.replicate import replicate
from synkhronos.world.rank_state import Command
from synkhronos.world.schedule import Pending, ScheduledRun
from synkhronos.world.world import World, current_world


def resolve(
    shared_vars: SharedVariables, unused_too: bool = False
) -> tuple[World, list[SharedVariable], bool]:
    """Return the world, the list of variables, and whether a single one was given instead of a list.

    Variables that no function uses raise an error, unless `unused_too`; they have no number yet.
    """
    world = current_world()
    world.check_usable()
    variables = check_tensors(world.rank_state.engine, shared_vars)
    for variable in variables if not unused_too else ():
        if variable not in world.registry.numbers:
            raise ValueError(
                f"shared_vars: {variable} is not used by any function built with synk.function(); use "
                f"it in one, or call synk.broadcast() on it"
            )
    if not unused_too and world.before_command is not None:
        world.before_command()
    return world, variables, not isinstance(shared_vars, (list, tuple))


def check_tensors(engine: Engine, shared_vars: Any) -> list[SharedVariable]:
    """Return shared variables as a list; raise if they are no variables of tensors, or not distinct."""
    variables = list(shared_vars) if isinstance(shared_vars, (list, tuple)) else [shared_vars]
    if not variables:
        raise ValueError("shared_vars: expected at least one shared variable, got an empty list")
    seen = set()
    for variable in variables:
        if not engine.is_shared(variable) or not engine.is_tensor(variable):
            raise TypeError(
                f"shared_vars: expected shared variables of tensors, got {shortened(variable)}"
            )
        if variable in seen:
            raise ValueError(f"shared_vars: {variable} is given more than once")
        seen.add(variable)
    return variables


def register(world: World, variables: Sequence[SharedVariable]) -> None:
    """Give numbers to variables that have none."""
    new = [variable for variable in variables if variable not in world.registry.numbers]
    for variable in new:
        world.registry.add_shared(variable)


def submit(world: World, command: Command, finish: Finish, used: Any) -> Any:
    """Replicate missing functions and variables, then run a command; see `World.submit`."""
    if type(command) is not ScheduledRun:  # with which nothing new has come
        replicate(world)
    return world.submit(command, finish, used)


def submit_equalizing(
    world: World, command: Command, numbers: Sequence[int], variables: Sequence[SharedVariable]
) -> Pending | None:
    """Like `submit`, for a collective after which the replicas of its variables are equal.

    A repeated collective is not submitted again, so its end is noted, too.
    """
    tracker = replica_tracker_of(world)
    if type(command) is ScheduledRun and world.recorder is None:
        tracker.equalized(numbers, world.run(command))
        return None
    if world.is_recording:
        tracker.equalized(numbers)  # for the next calls of the block
    note = functools.partial(tracker.equalized, numbers)
    pending: Pending | None = submit(world, command, note, variables)
    return pending


def numbers_of(world: World, variables: Sequence[SharedVariable]) -> list[int]:
    """Return the numbers by which the ranks know the variables."""
    return [world.registry.numbers[variable] for variable in variables]


def as_list(shared_vars: SharedVariables, values: Values) -> list[Any]:
    """Return one value for each variable. If `shared_vars` is a list, so must `values` be."""
    if not isinstance(shared_vars, (list, tuple)):
        return [values]
    if not isinstance(values, (list, tuple)) or len(values) != len(shared_vars):
        got = len(values) if isinstance(values, (list, tuple)) else type(values).__name__
        raise ValueError(f"values: expected one for each variable, {len(shared_vars)}, got {got}")
    return list(values)


def conditioned(
    engine: Engine,
    variables: Sequence[SharedVariable],
    values: Sequence[Any],
    scattered: bool = False,
) -> list[np.ndarray | Data]:
    """Convert values to arrays or `Data` with the dtypes and ndims of the variables."""
    arrays: list[np.ndarray | Data] = []
    for variable, value in zip(variables, values):
        kind = engine.type_of(variable)
        label = f"value for {variable}"
        value = in_order_of(dims_of(variable), value, label)
        array: np.ndarray | Data = condition(value, kind.dtype, kind.ndim, False, label)
        if scattered and (not kind.ndim or kind.extents[0] is not None):
            raise ValueError(f"value for {variable}: its type has no rows that can be split")
        for axis, (extent, fixed) in enumerate(zip(array.shape, kind.extents)):
            if fixed not in (None, extent):
                raise TypeError(
                    f"value for {variable}: expected extent {fixed} on axis {axis}, got {array.shape}"
                )
        if isinstance(value, Data) and value.dtype == array.dtype:
            array = value
        arrays.append(array)
    return arrays


def check_rank(world: World, rank: int) -> int:
    """Return the argument `rank`, or raise if there is no such rank."""
    rank = check_int(rank, "rank")
    if not 0 <= rank < world.size:
        raise IndexError(f"rank: expected 0 to {world.size - 1}, got {rank}")
    return rank


def check_has_rows(engine: Engine, variables: Sequence[SharedVariable], what: str) -> None:
    """Raise ``ValueError`` if a variable has no axis 0; `what` names the call."""
    for variable in variables:
        if not engine.type_of(variable).ndim:
            raise ValueError(f"{what}: {variable} has no axis 0")
