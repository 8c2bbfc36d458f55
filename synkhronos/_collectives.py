"""Collectives on shared variables: each function with its command."""

from __future__ import annotations

import numpy as np

from synkhronos._arguments import in_shared_memory
from synkhronos._conversion import as_array
from synkhronos._function import Function
from synkhronos._fuse import Pending
from synkhronos._here import Command
from synkhronos._operations import find_operation
from synkhronos._replicas import Assign
from synkhronos._shared_variables import (
    as_list,
    check_has_rows,
    check_nccl,
    conditioned,
    numbers_of,
    resolve,
    submit,
)
from synkhronos._typing import ArrayLike, Result, SharedVariables, Values


class Broadcast(Command):
    """Every rank's replicas become the master's."""

    def __init__(self, numbers, nccl):
        self.numbers, self.nccl = numbers, nccl

    def run(self, here):
        variables = [here.shareds[number] for number in self.numbers]
        storages = [here.engine.storage(variable) for variable in variables]
        values = here.communicator(self.nccl).broadcast(storages, here.master_rank)
        for variable, value in zip(variables, values):
            here.engine.store(variable, value)


def broadcast(
    shared_vars: SharedVariables, values: Values | None = None, nccl: bool = True
) -> Pending | None:
    """Give the master's value, or `values`, to every rank.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
    values : array-like or Data, or list of these, optional
    nccl : bool
        Whether NCCL may be used, where there is one.

    Raises
    ------
    TypeError, ValueError
        If a variable is used by no function, or a value does not fit its variable.
    """
    world, variables, _ = resolve(shared_vars)
    numbers = numbers_of(world, variables)
    command: Command = Broadcast(numbers, check_nccl(nccl))
    if values is not None:
        arrays = conditioned(world, variables, as_list(shared_vars, values, "values"))
        datas = [in_shared_memory(world, array) for array in arrays]
        command = Assign(numbers, [data.reference() for data in datas])
        kept = [data.data for data in datas]
        return submit(world, command, lambda results, kept=kept: None)
    return submit(world, command, lambda results: None)


class Gather(Command):
    """Bring every rank's replicas to the master, or to all ranks, joined along axis 0."""

    def __init__(self, numbers, to_all, nccl):
        self.numbers, self.to_all, self.nccl = numbers, to_all, nccl

    def run(self, here):
        comm = here.communicator(self.nccl)
        variables = [here.shareds[number] for number in self.numbers]
        storages = [here.engine.storage(variable) for variable in variables]
        if not self.to_all:
            return comm.gather(storages, here.master_rank)
        for variable, arrays in zip(variables, comm.all_gather(storages)):
            here.engine.store(variable, here.engine.arithmetic.concatenate(arrays))


def gather(shared_vars: SharedVariables, nd_up: int = 1, nccl: bool = True) -> Result:
    """Return the ranks' values.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
    nd_up : {1, 0}
        1: stacked on a new axis 0; values of unequal shapes are returned as a list by rank. 0:
        concatenated along axis 0.
    nccl : bool
        Whether NCCL may be used, where there is one.

    Returns
    -------
    numpy.ndarray, or list of these
    """
    world, variables, single = resolve(shared_vars)
    if isinstance(nd_up, bool) or nd_up not in (0, 1):
        raise ValueError(f"gather: nd_up: expected 0 or 1, got {nd_up!r}")
    if nd_up == 0:
        check_has_rows(world, variables, "gather(nd_up=0)")

    def finish(results):
        joined = [_join(arrays, nd_up) for arrays in results[world.master_rank]]
        return joined[0] if single else joined

    command = Gather(numbers_of(world, variables), to_all=False, nccl=check_nccl(nccl))
    return submit(world, command, finish)


def _join(arrays, nd_up):
    if nd_up == 0:
        if len({array.shape[1:] for array in arrays}) > 1:
            raise ValueError(
                f"gather(nd_up=0): expected shapes equal but for axis 0, got "
                f"{[array.shape for array in arrays]} by rank; use nd_up=1 for a list"
            )
        return np.concatenate(arrays)
    if len({array.shape for array in arrays}) > 1:
        return arrays
    return np.stack(arrays)


def all_gather(shared_vars: SharedVariables, nccl: bool = True) -> Pending | None:
    """Make every rank's variable the concatenation, along axis 0, of all ranks' values.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
    nccl : bool
        Whether NCCL may be used, where there is one.
    """
    world, variables, _ = resolve(shared_vars)
    check_has_rows(world, variables, "all_gather")
    for variable in variables:
        if world.here.engine.type_of(variable).broadcastable[0]:
            raise ValueError(f"all_gather: {variable} has extent 1 on axis 0 by its type")
    command = Gather(numbers_of(world, variables), to_all=True, nccl=check_nccl(nccl))
    return submit(world, command, lambda results: None)


class Reduce(Command):
    """Reduce replicas: into the master's, into every rank's, or to an array of the master's.

    Parameters
    ----------
    numbers : list of int
    op : str
    target : {"all", "master", "new"}
    weights : list of float, int, or None
        By rank; or the number of a function, whose rows count.
    nccl : bool
    """

    def __init__(self, numbers, op, target, weights, nccl):
        self.numbers, self.op, self.target = numbers, op, target
        self.weights, self.nccl = weights, nccl

    def run(self, here):
        comm = here.communicator(self.nccl)
        variables = [here.shareds[number] for number in self.numbers]
        arrays = [here.engine.storage(variable) for variable in variables]
        weight = self._weight(here)
        if self.target == "all":
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


def reduce(
    shared_vars: SharedVariables,
    op: str = "avg",
    in_place: bool = True,
    nccl: bool = True,
    *,
    weights: Function | ArrayLike | None = None,
) -> Result:
    """Reduce the ranks' values to the master.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
    op : {"avg", "sum", "prod", "min", "max"}
    in_place : bool
        Whether the master's variable becomes the result; else it is returned.
    nccl : bool
        Whether NCCL may be used, where there is one.
    weights : Function, or sequence of float, optional
        Weights by rank in ``"avg"``; of a function, the rows that each rank had in its last call.

    Returns
    -------
    None, or numpy.ndarray or list of these if not `in_place`

    Raises
    ------
    TypeError
        For ``"avg"`` of integers.
    ValueError
        For unequal shapes, listed by rank.
    """
    world, variables, single = resolve(shared_vars)
    command = _plan_reduction(world, variables, op, "master" if in_place else "new", weights, nccl)

    def finish(results):
        if in_place:
            return None
        reduced = results[world.master_rank]
        return reduced[0] if single else reduced

    return submit(world, command, finish)


def all_reduce(
    shared_vars: SharedVariables,
    op: str = "avg",
    nccl: bool = True,
    *,
    weights: Function | ArrayLike | None = None,
) -> Pending | None:
    """Make every rank's variable the reduction of all ranks' values.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
    op : {"avg", "sum", "prod", "min", "max"}
    nccl : bool
        Whether NCCL may be used, where there is one.
    weights : Function, or sequence of float, optional
        Weights by rank in ``"avg"``; of a function, the rows that each rank had in its last call:
        the average is then exact for batches that do not divide evenly.

    Raises
    ------
    TypeError
        For ``"avg"`` of integers.
    ValueError
        For unequal shapes, listed by rank.
    """
    world, variables, _ = resolve(shared_vars)
    command = _plan_reduction(world, variables, op, "all", weights, nccl)
    return submit(world, command, lambda results: None)


def _plan_reduction(world, variables, op, target, weights, nccl):
    """Return the command; that of the last time if it is the same, so that its bytes are, too."""
    operation = find_operation(op)
    command = Reduce(
        numbers_of(world, variables), op, target, _check_weights(world, weights), check_nccl(nccl)
    )
    last = world.last_reduction
    if last is not None and vars(last) == vars(command):
        return last
    for variable in variables:
        operation.check_dtype(world.here.engine.type_of(variable).dtype, variable)
    world.last_reduction = command
    return command


def _check_weights(world, weights):
    if weights is None:
        return None
    if isinstance(weights, Function):
        if world.here.functions[weights.number : weights.number + 1] != [weights]:
            raise ValueError(f"weights: {weights!r} is not a function of this world")
        return weights.number
    numbers = as_array(weights, None, "weights")
    fitting = numbers.shape == (world.size,) and numbers.dtype.kind != "c"
    if not fitting or not np.isfinite(numbers).all() or min(numbers) < 0 or not any(numbers):
        raise ValueError(
            f"weights: expected {world.size} numbers, one a rank, none negative and not all zero, "
            f"got {weights}"
        )
    return numbers.tolist()
