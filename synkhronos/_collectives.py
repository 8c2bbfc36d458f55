"""Shared variables across ranks: the ten functions, each with its command."""

import numpy as np

from synkhronos import _world
from synkhronos._data import Data, condition, open_reference
from synkhronos._function import Function
from synkhronos._operations import concatenate, find_operation
from synkhronos._partition import as_slice, select, share
from synkhronos._replicate import replicate
from synkhronos._world import Command

# Broadcast


class Broadcast(Command):
    """Every rank's replicas become the master's."""

    def __init__(self, numbers):
        self.numbers = numbers

    def run(self, here):
        for number in self.numbers:
            shared = here.shareds[number]
            storage = here.engine.storage(shared)
            if isinstance(storage, np.ndarray):
                here.engine.store(shared, here.comm.broadcast(storage, here.master_rank))


def broadcast(shared_vars, values=None, nccl=True):
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
    world, variables, _ = _resolve(shared_vars)
    numbers = _numbers(world, variables)
    command = Broadcast(numbers)
    if values is not None:
        arrays = _conditioned(world, variables, _as_list(shared_vars, values, "values"))
        datas = [_in_shared_memory(world, array) for array in arrays]
        command = _Assign(numbers, [data.reference() for data in datas])
        return world.submit(command, lambda results, kept=datas: None)
    return world.submit(command, lambda results: None)


# Scatter, set_value, get_value


class _Assign(Command):
    """Replicas become arrays of shared memory: all rows, or each rank's share of some rows.

    Parameters
    ----------
    numbers, references : list
        Of the variables and of the arrays.
    rows : list of (range or numpy.ndarray), optional
        For each array, which rows are shared out among the ranks.
    only : int, optional
        The one rank that does it.
    """

    def __init__(self, numbers, references, rows=None, only=None):
        self.numbers, self.references, self.rows, self.only = numbers, references, rows, only

    def run(self, here):
        if self.only not in (None, here.rank):
            return
        for position, number in enumerate(self.numbers):
            value = open_reference(here, self.references[position])
            if self.rows is not None:
                rows = self.rows[position]
                if self.only is None:
                    start, stop = share(len(rows), here.size, here.rank)
                    rows = rows[start:stop]
                value = value[as_slice(rows)] if isinstance(rows, range) else value.take(rows, 0)
            _write(here, here.shareds[number], value)


def scatter(shared_vars, values=None, batch=None):
    """Split rows of `values` over the ranks, as evenly as possible, the longer shares first.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
    values : array-like or Data, or list of these, optional
        None: the data bound to each variable by `set_shmems`.
    batch : int, slice, 1-d array-like of int or bool, optional
        The rows to use.

    Raises
    ------
    TypeError, ValueError, IndexError
    """
    world, variables, _ = _resolve(shared_vars)
    if values is None:
        missing = [str(variable) for variable in variables if variable not in world.bound]
        if missing:
            raise ValueError(
                f"scatter: no values given, and no data bound to {', '.join(missing)}; give values, "
                f"or bind data with set_shmems()"
            )
        values = [world.bound[variable] for variable in variables]
    else:
        values = _as_list(shared_vars, values, "values")
    arrays = _conditioned(world, variables, values, scattered=True)
    rows = [select(batch, len(array)) for array in arrays]
    datas = [_in_shared_memory(world, array) for array in arrays]
    command = _Assign(_numbers(world, variables), [data.reference() for data in datas], rows)
    return world.submit(command, lambda results, kept=datas: None)


def set_value(rank, shared_vars, values, batch=None):
    """Set the replicas of one rank.

    Parameters
    ----------
    rank : int
    shared_vars : shared variable, or list of these
    values : array-like or Data, or list of these
    batch : int, slice, 1-d array-like of int or bool, optional
        The rows of `values` to use.
    """
    world, variables, _ = _resolve(shared_vars)
    rank = _check_rank(world, rank)
    values = _as_list(shared_vars, values, "values")
    arrays = _conditioned(world, variables, values, scattered=batch is not None)
    rows = None if batch is None else [select(batch, len(array)) for array in arrays]
    datas = [_in_shared_memory(world, array) for array in arrays]
    numbers = _numbers(world, variables)
    command = _Assign(numbers, [data.reference() for data in datas], rows, rank)
    return world.submit(command, lambda results, kept=datas: None)


class _Fetch(Command):
    """Bring copies of one rank's replicas to the master."""

    def __init__(self, numbers, rank):
        self.numbers, self.rank = numbers, rank

    def run(self, here):
        if here.rank != self.rank:
            return None
        storages = [here.engine.storage(here.shareds[number]) for number in self.numbers]
        if here.is_master:
            return [np.array(storage) for storage in storages]
        placed = [here.memory.place(np.ascontiguousarray(one)) for one in storages]
        here.outbox.extend(placed)
        return [(here.memory.reference(array), np.shape(one)) for array, one in zip(placed, storages)]


def get_value(rank, shared_vars):
    """Return copies of the replicas of one rank: an array, or a list where a list was given."""
    world, variables, single = _resolve(shared_vars)
    rank = _check_rank(world, rank)

    def finish(results):
        values = results[rank]
        if rank != world.master_rank:
            values = [world.here.memory.open(place).reshape(s).copy() for place, s in values]
        return values[0] if single else values

    return world.submit(_Fetch(_numbers(world, variables), rank), finish)


# Gather


class Gather(Command):
    """Bring every rank's replicas to the master, or to all ranks, joined along axis 0."""

    def __init__(self, numbers, to_all):
        self.numbers, self.to_all = numbers, to_all

    def run(self, here):
        gathered = []
        for number in self.numbers:
            storage = here.engine.storage(here.shareds[number])
            if self.to_all:
                joined = concatenate(here.comm.all_gather(storage))
                here.engine.store(here.shareds[number], joined)
            else:
                gathered.append(here.comm.gather(storage, here.master_rank))
        return gathered if here.is_master else None


def gather(shared_vars, nd_up=1, nccl=True):
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
    world, variables, single = _resolve(shared_vars)
    if isinstance(nd_up, bool) or nd_up not in (0, 1):
        raise ValueError(f"gather: nd_up: expected 0 or 1, got {nd_up!r}")
    if nd_up == 0:
        _check_has_rows(world, variables, "gather(nd_up=0)")

    def finish(results):
        joined = [_join(arrays, nd_up) for arrays in results[world.master_rank]]
        return joined[0] if single else joined

    return world.submit(Gather(_numbers(world, variables), to_all=False), finish)


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


def all_gather(shared_vars, nccl=True):
    """Make every rank's variable the concatenation, along axis 0, of all ranks' values.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
    nccl : bool
        Whether NCCL may be used, where there is one.
    """
    world, variables, _ = _resolve(shared_vars)
    _check_has_rows(world, variables, "all_gather")
    for variable in variables:
        if world.here.engine.type_of(variable).broadcastable[0]:
            raise ValueError(f"all_gather: {variable} has extent 1 on axis 0 by its type")
    command = Gather(_numbers(world, variables), to_all=True)
    return world.submit(command, lambda results: None)


# Reduce


class Reduce(Command):
    """Reduce replicas: into the master's, into every rank's, or to an array of the master's.

    Parameters
    ----------
    numbers : list of int
    op : str
    target : {"all", "master", "new"}
    weights : list of float, int, or None
        By rank; or the number of a function, whose rows count.
    """

    def __init__(self, numbers, op, target, weights):
        self.numbers, self.op, self.target, self.weights = numbers, op, target, weights

    def run(self, here):
        weight = self._weight(here)
        reduced = []
        for number in self.numbers:
            shared = here.shareds[number]
            array = here.engine.storage(shared)
            if self.target == "all":
                here.engine.store(shared, here.comm.all_reduce(array, self.op, weight))
            elif self.target == "master" or not here.is_master:
                array = here.comm.reduce(array, self.op, here.master_rank, weight)
                here.engine.store(shared, array)
            else:
                array = here.comm.reduce(array.copy(), self.op, here.master_rank, weight)
                reduced.append(array.copy())
        return reduced if here.is_master else None

    def _weight(self, here):
        if self.weights is None:
            return 1
        if isinstance(self.weights, int):
            return here.rows.get(self.weights, 0)
        return self.weights[here.rank]


def reduce(shared_vars, op="avg", in_place=True, nccl=True, *, weights=None):
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
    world, variables, single = _resolve(shared_vars)
    _check_operation(world, variables, op)
    target = "master" if in_place else "new"

    def finish(results):
        if in_place:
            return None
        reduced = results[world.master_rank]
        return reduced[0] if single else reduced

    command = Reduce(_numbers(world, variables), op, target, _check_weights(world, weights))
    return world.submit(command, finish)


def all_reduce(shared_vars, op="avg", nccl=True, *, weights=None):
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
    world, variables, _ = _resolve(shared_vars)
    _check_operation(world, variables, op)
    command = Reduce(_numbers(world, variables), op, "all", _check_weights(world, weights))
    return world.submit(command, lambda results: None)


# Shapes


class _Shapes(Command):
    def __init__(self, numbers):
        self.numbers = numbers

    def run(self, here):
        return [np.shape(here.engine.storage(here.shareds[number])) for number in self.numbers]


def get_shapes(shared_vars):
    """Return each variable's shapes by rank: a list, or a list of lists where a list was given."""
    world, variables, single = _resolve(shared_vars)

    def finish(results):
        shapes = [list(by_rank) for by_rank in zip(*results)]
        return shapes[0] if single else shapes

    return world.submit(_Shapes(_numbers(world, variables)), finish)


def get_lengths(shared_vars):
    """Return each variable's lengths by rank: a list, or a list of lists where a list was given."""
    world, variables, single = _resolve(shared_vars)
    _check_has_rows(world, variables, "get_lengths")

    def finish(results):
        lengths = [[shape[0] for shape in by_rank] for by_rank in zip(*results)]
        return lengths[0] if single else lengths

    return world.submit(_Shapes(_numbers(world, variables)), finish)


# Checks


def _resolve(shared_vars):
    """Return the world, the list of variables, and whether just one was given bare."""
    world = _world.current()
    world.check_usable()
    single = not isinstance(shared_vars, (list, tuple))
    variables = [shared_vars] if single else list(shared_vars)
    if not variables:
        raise ValueError("shared_vars: expected at least one shared variable, got an empty list")
    for variable in variables:
        if not world.here.engine.is_shared(variable):
            raise TypeError(f"shared_vars: expected shared variables of tensors, got {variable!r}")
        if variable not in world.shared_numbers:
            raise ValueError(
                f"shared_vars: {variable} is used by no function made with synk.function()"
            )
    replicate(world)
    return world, variables, single


def _numbers(world, variables):
    return [world.shared_numbers[variable] for variable in variables]


def _as_list(shared_vars, values, what):
    """Return one value a variable: `values` is a list where `shared_vars` is one."""
    if not isinstance(shared_vars, (list, tuple)):
        return [values]
    if not isinstance(values, (list, tuple)) or len(values) != len(shared_vars):
        got = len(values) if isinstance(values, (list, tuple)) else type(values).__name__
        raise ValueError(f"{what}: expected one a variable, {len(shared_vars)}, got {got}")
    return list(values)


def _conditioned(world, variables, values, scattered=False):
    """Return values as arrays, or `Data`, that the variables can hold."""
    arrays = []
    for variable, value in zip(variables, values):
        kind = world.here.engine.type_of(variable)
        array = condition(value, np.dtype(kind.dtype), kind.ndim, False, f"value for {variable}")
        if scattered and (not kind.ndim or kind.broadcastable[0]):
            raise ValueError(f"value for {variable}: its type has no rows that can be split")
        for axis, (extent, is_one) in enumerate(zip(array.shape, kind.broadcastable)):
            if is_one and extent != 1:
                raise TypeError(
                    f"value for {variable}: expected extent 1 on axis {axis}, got {array.shape}"
                )
        if isinstance(value, Data) and value.dtype == array.dtype:
            array = value
        arrays.append(array)
    return arrays


def _in_shared_memory(world, array):
    if isinstance(array, Data):
        return array
    data = Data(world, array.dtype, array.ndim)
    data.set_value(array)
    return data


def _write(here, shared, value):
    """Copy a value into a replica, in place where it has the shape."""
    storage = here.engine.storage(shared)
    if storage.shape == value.shape and storage.flags.writeable:
        storage[...] = value
    else:
        here.engine.store(shared, np.array(value))


def _check_rank(world, rank):
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
        raise TypeError(f"rank: expected an int, got {rank!r}")
    if not 0 <= rank < world.size:
        raise IndexError(f"rank: expected 0 to {world.size - 1}, got {rank}")
    return int(rank)


def _check_operation(world, variables, op):
    operation = find_operation(op)
    for variable in variables:
        operation.check_dtype(world.here.engine.type_of(variable).dtype, str(variable))


def _check_has_rows(world, variables, what):
    for variable in variables:
        if not world.here.engine.type_of(variable).ndim:
            raise ValueError(f"{what}: {variable} has no axis 0")


def _check_weights(world, weights):
    if weights is None:
        return None
    if isinstance(weights, Function):
        if world.here.functions[weights.number : weights.number + 1] != [weights]:
            raise ValueError(f"weights: {weights!r} is not a function of this world")
        return weights.number
    weights = [float(weight) for weight in weights]
    if len(weights) != world.size or min(weights) < 0 or not sum(weights) > 0:
        raise ValueError(
            f"weights: expected {world.size} numbers, one a rank, none negative and not all zero, "
            f"got {weights}"
        )
    return weights
