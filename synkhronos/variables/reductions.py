"""The reduction of replicas: its command, and the check of its arguments."""

from __future__ import annotations

import weakref
from typing import Any, Sequence

import numpy as np

from synkhronos._typing import ArrayLike, ReduceOp, SharedVariable, SharedVariables
from synkhronos.arithmetic.conversion import as_array
from synkhronos.arithmetic.operations import find_operation
from synkhronos.comms.formats import Format, check_arrays, check_format
from synkhronos.engines.base import Engine
from synkhronos.functions.function import Function
from synkhronos.variables.begun import begun, has_completed
from synkhronos.variables.naming import check_nccl, numbers_of, resolve, storages
from synkhronos.world.here import Command
from synkhronos.world.world import World, current_world


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

    def __init__(self, numbers, op, target, weights, nccl, wire=None, begun=()):
        self.numbers, self.op, self.target = numbers, op, target
        self.weights, self.nccl, self.wire, self.begun = weights, nccl, wire, dict(begun)

    @property
    def is_like_serial(self):
        return self.target == "all"

    def exact(self) -> Reduce:
        return Reduce(self.numbers, self.op, self.target, self.weights, self.nccl)

    def run(self, here):
        comm = here.communicator(self.nccl)
        numbers = self.numbers
        if here.ahead is not None:
            numbers = [number for number in numbers if not has_completed(here, self, number)]
            if not numbers:
                return None
        variables = [here.shareds[number] for number in numbers]
        arrays = storages(here, numbers)
        weight = self._weight(here)
        if self.target == "all" and self.wire is not None and comm.over_cpu.has_wires:
            shapes = [array.shape for array in arrays]
            wires = [here.wire(one, self.wire, shape) for one, shape in zip(numbers, shapes)]
            reduced = comm.over_cpu.all_reduce_in(wires, arrays, self.op, weight)
        elif self.target == "all":
            reduced = comm.all_reduce(arrays, self.op, weight)
        else:
            if self.target == "new" and here.is_master:
                arrays = [array.copy() for array in arrays]
            reduced = comm.reduce(arrays, self.op, here.master_rank, weight)
            if self.target == "new" and here.is_master:
                return [np.array(here.engine.to_host(array)) for array in reduced]
        for variable, array in zip(variables, reduced):
            here.engine.store(variable, array)

    def _weight(self, here):
        if self.weights is None:
            return 1
        if isinstance(self.weights, int):
            return here.rows.get(self.weights, 0)
        return self.weights[here.rank]


class _LastReduction:
    """The last reduction and its arguments, so that a repeated one is checked and pickled only once."""

    arguments: tuple | None = None
    command: Reduce
    options: tuple = ()  # as the script gave them
    objects: list[weakref.ref] = []  # what it gave: the variables, and the function if there is one

    def is_repeated(self, options: tuple, objects: Sequence[Any]) -> bool:
        """Whether the script has given the same objects again."""
        return (
            options == self.options
            and len(objects) == len(self.objects)
            and all([known() is one for known, one in zip(self.objects, objects)])
        )


def plan_reduction(
    shared_vars: SharedVariables,
    op: ReduceOp,
    target: str,
    weights: Function | ArrayLike | None,
    nccl: bool,
    wire: Format | None = None,
) -> tuple[World, list[SharedVariable], Reduce]:
    """Return the world, the variables and the command, after checking the arguments.

    If the command equals the last one, that object is returned, which is already pickled.
    """
    world = current_world()
    world.check_usable()
    last = world.part(_LastReduction)
    is_simple = type(op) is str and type(nccl) is bool and wire is None
    objects = list(shared_vars) if isinstance(shared_vars, (list, tuple)) else [shared_vars]
    if isinstance(weights, Function):
        objects.append(weights)
    elif weights is not None:
        is_simple = False
    options = op, target, nccl, isinstance(weights, Function), world.registry.n_functions
    if is_simple and last.is_repeated(options, objects):
        return world, objects[: len(last.command.numbers)], last.command
    _, variables, _ = resolve(shared_vars)
    command = _plan(world, variables, op, target, weights, nccl, wire)
    if is_simple:
        last.options, last.objects = options, [weakref.ref(one) for one in objects]
    return world, variables, command


def _plan(world, variables, op, target, weights, nccl, wire):
    operation, numbers = find_operation(op), numbers_of(world, variables)
    weights, nccl = _check_weights(world, operation, weights), check_nccl(nccl)
    started = begun(world.here.engine, numbers, variables) if target == "all" else ()
    arguments = numbers, op, target, weights, nccl, check_format(wire, op), started
    last = world.part(_LastReduction)
    last.options = ()
    if arguments == last.arguments:
        return last.command
    for variable in variables:
        operation.check_dtype(world.here.engine.type_of(variable).dtype, variable)
    check_wire(world.here.engine, wire, variables)
    last.arguments, last.command = arguments, Reduce(*arguments)
    return last.command


def check_wire(engine: Engine, wire: Format | None, variables: Sequence[SharedVariable]) -> None:
    """Raise if shared variables cannot be sent in a wire format."""
    if wire is not None:
        arrays = [engine.storage(variable) for variable in variables]
        check_arrays(wire, variables, arrays, [engine.pieces_of(variable) for variable in variables])


def _check_weights(world, operation, weights):
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
            f"got {weights}"
        )
    return numbers.tolist()
