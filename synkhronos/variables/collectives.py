"""Collectives on shared variables: each function with its command."""

from __future__ import annotations

import numpy as np

from synkhronos._typing import ArrayLike, Result, SharedVariables, Values
from synkhronos.arithmetic.conversion import as_array
from synkhronos.arithmetic.operations import find_operation
from synkhronos.functions.function import Function
from synkhronos.variables.naming import (
    as_list,
    check_has_rows,
    check_nccl,
    conditioned,
    numbers_of,
    resolve,
    submit,
)
from synkhronos.variables.replicas import assign
from synkhronos.world.fuse import Pending
from synkhronos.world.here import Command


class Broadcast(Command):
    """Set every rank's replicas to the master's."""

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
        Whether NCCL may be used, if there is one.

    Raises
    ------
    TypeError
        If something is not a shared tensor, or a value cannot be cast safely to its variable's dtype.
    ValueError
        If no function uses a variable, or the number of values is wrong.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> synk.fork(2, use_gpu=False)
    2
    >>> rate = theano.shared(0.5, name="rate")
    >>> f = synk.function([], rate)  # the average over the ranks
    >>> synk.distribute()
    >>> synk.broadcast(rate, 0.25)
    >>> f()
    array(0.25)
    >>> rate.set_value(0.125)  # the master's value only
    >>> synk.broadcast(rate)
    >>> f()
    array(0.125)
    >>> synk.close()
    """
    world, variables, _ = resolve(shared_vars)
    nccl = check_nccl(nccl)
    if values is not None:
        arrays = conditioned(world, variables, as_list(shared_vars, values, "values"))
        return assign(world, variables, arrays)
    return submit(world, Broadcast(numbers_of(world, variables), nccl), lambda results: None)


class Gather(Command):
    """Return every rank's replicas to the master, or join them along axis 0 on every rank."""

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
    """Return the values of all ranks.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
    nd_up : {1, 0}
        1: stacked on a new axis 0, in the order of the ranks. 0: concatenated along axis 0.
    nccl : bool
        Whether NCCL may be used, if there is one.

    Returns
    -------
    numpy.ndarray, or list of these
        Of shape ``(n, *shape)``; with ``nd_up=0`` of shape ``(sum of the ranks' rows, ...)``. Where the
        ranks' shapes differ and ``nd_up=1``, a list of arrays by rank instead of an array. A list of
        such results if `shared_vars` is a list.

    Raises
    ------
    TypeError
        If something is not a shared tensor.
    ValueError
        If no function uses a variable, or if shapes differ in more than axis 0 with ``nd_up=0``.

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
                f"gather(nd_up=0): expected shapes that are equal except for axis 0, got "
                f"{[array.shape for array in arrays]} by rank; use nd_up=1 to get a list"
            )
        return np.concatenate(arrays)
    if len({array.shape for array in arrays}) > 1:
        return arrays
    return np.stack(arrays)


def all_gather(shared_vars: SharedVariables, nccl: bool = True) -> Pending | None:
    """Set every rank's variable to the concatenation, along axis 0, of all ranks' values.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
    nccl : bool
        Whether NCCL may be used, if there is one.

    Raises
    ------
    TypeError
        If something is not a shared tensor.
    ValueError
        If no function uses a variable, or its type does not allow for more rows.
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
        By rank; or the number of a function: the rows that each rank had in its last call.
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


class _LastReduction:
    """The command of the last reduction: repeated in every step, it is checked and pickled once."""

    command: Reduce | None = None


def reduce(
    shared_vars: SharedVariables,
    op: str = "avg",
    in_place: bool = True,
    nccl: bool = True,
    *,
    weights: Function | ArrayLike | None = None,
) -> Result:
    """Reduce the values of all ranks to one on the master.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
    op : {"avg", "sum", "prod", "min", "max"}
    in_place : bool
        Whether the master's variable is set to the result; else the result is returned.
    nccl : bool
        Whether NCCL may be used, if there is one.
    weights : Function, or sequence of float, optional
        Weights by rank in ``"avg"``; a function stands for the rows that each rank had in its last
        call.

    Returns
    -------
    None, or numpy.ndarray or list of these if not `in_place`
        Of the shape that the variable has on every rank.

    Raises
    ------
    TypeError
        For ``"avg"`` of integers.
    ValueError
        For shapes that differ from rank to rank, which are listed; and for `weights` with another
        operation than ``"avg"``.

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
    """Set every rank's variable to the reduction of all ranks' values.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
    op : {"avg", "sum", "prod", "min", "max"}
    nccl : bool
        Whether NCCL may be used, if there is one.
    weights : Function, or sequence of float, optional
        Weights by rank in ``"avg"``; a function stands for the rows that each rank had in its last
        call: the average is then exact for batches that do not divide evenly.

    Raises
    ------
    TypeError
        For ``"avg"`` of integers.
    ValueError
        For shapes that differ from rank to rank, which are listed; and for `weights` with another
        operation than ``"avg"``.

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
    world, variables, _ = resolve(shared_vars)
    command = _plan_reduction(world, variables, op, "all", weights, nccl)
    return submit(world, command, lambda results: None)


def _plan_reduction(world, variables, op, target, weights, nccl):
    """Return the command; that of the last time if it is the same, so that its bytes are, too."""
    operation = find_operation(op)
    command = Reduce(
        numbers_of(world, variables),
        op,
        target,
        _check_weights(world, operation, weights),
        check_nccl(nccl),
    )
    last = world.part(_LastReduction)
    if last.command is not None and vars(last.command) == vars(command):
        return last.command
    for variable in variables:
        operation.check_dtype(world.here.engine.type_of(variable).dtype, variable)
    last.command = command
    return command


def _check_weights(world, operation, weights):
    if weights is None:
        return None
    if not operation.weighted:
        raise ValueError(
            f"weights: expected none for the operation {operation.name!r}, which is not an average; "
            f"leave them out, or use 'avg'"
        )
    if isinstance(weights, Function):
        if not any(weights is function for function in world.registry.functions):
            raise ValueError(f"weights: {weights!r} is not a function of this world")
        return weights.replica.number
    numbers = as_array(weights, None, "weights")
    fitting = numbers.shape == (world.size,) and numbers.dtype.kind != "c"
    if not fitting or not np.isfinite(numbers).all() or min(numbers) < 0 or not any(numbers):
        raise ValueError(
            f"weights: expected {world.size} numbers, one per rank, none negative and not all zero, "
            f"got {weights}"
        )
    return numbers.tolist()
