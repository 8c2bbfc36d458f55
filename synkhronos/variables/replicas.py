"""Reading and writing the ranks' replicas of shared variables, each rank for itself."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from synkhronos._typing import Batch, Result, Rows, SharedVariable, SharedVariables, Values
from synkhronos.arithmetic.partition import select, share
from synkhronos.arrays.binding import bound_data
from synkhronos.arrays.data import Data, as_data
from synkhronos.variables.naming import (
    as_list,
    check_has_rows,
    check_rank,
    conditioned,
    numbers_of,
    resolve,
    submit,
)
from synkhronos.world.fuse import Pending
from synkhronos.world.here import Command
from synkhronos.world.world import World


class Assign(Command):
    """Set replicas to stored arrays: to all rows, or to each rank's share of some rows.

    Parameters
    ----------
    numbers : list of int
        Of the variables.
    handles : list of Handle
        To the arrays.
    rows : list of (range or numpy.ndarray), optional
        For each array, the rows that are divided among the ranks.
    only : int, optional
        The one rank that does it.
    """

    def __init__(self, numbers, handles, rows=None, only=None):
        self.numbers, self.handles, self.rows, self.only = numbers, handles, rows, only

    def run(self, here):
        if self.only not in (None, here.rank):
            return
        for position, number in enumerate(self.numbers):
            here.engine.write(here.shareds[number], self._value(here, position))

    def _value(self, here, position):
        handle = self.handles[position]
        if self.rows is None:
            return here.store.get(handle)
        rows = self.rows[position]
        if self.only is None:
            start, stop = share(len(rows), here.size, here.rank)
            rows = rows[start:stop]
        return here.store.rows(handle, rows)


def assign(
    world: World,
    variables: Sequence[SharedVariable],
    arrays: Sequence[np.ndarray | Data],
    rows: Sequence[Rows] | None = None,
    only: int | None = None,
) -> Pending | None:
    """Set replicas to arrays, or `Data`, that fit the variables, as `Assign` does."""
    datas = [as_data(world, array) for array in arrays]
    command = Assign(numbers_of(world, variables), [data.handle() for data in datas], rows, only)
    kept = [data.data for data in datas]  # alive until the command has run
    return submit(world, command, lambda results, kept=kept: None)


def scatter(
    shared_vars: SharedVariables, values: Values | None = None, batch: Batch | None = None
) -> Pending | None:
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
    TypeError
        If a value cannot be cast safely to the dtype of its variable, or has another ndim.
    ValueError
        If no function uses a variable, or it has no rows, or no values are given nor bound.
    IndexError
        If `batch` names a row that does not exist.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> synk.fork(2, use_gpu=False)
    2
    >>> rows = theano.shared(np.zeros((1, 2)), name="rows")
    >>> f = synk.function([], (rows.sum(), "sum"))
    >>> synk.scatter(rows, np.arange(6.0).reshape(3, 2))
    >>> synk.get_value(0, rows)
    array([[0., 1.],
           [2., 3.]])
    >>> synk.get_value(1, rows)
    array([[4., 5.]])
    >>> f()
    array(15.)
    >>> synk.close()
    """
    world, variables, _ = resolve(shared_vars)
    if values is None:
        values = [bound_data(world, variable) for variable in variables]
        missing = [str(one) for one, value in zip(variables, values) if value is None]
        if missing:
            raise ValueError(
                f"scatter: no values given, and no data bound to {', '.join(missing)}; give values, "
                f"or bind data with set_shmems()"
            )
    else:
        values = as_list(shared_vars, values, "values")
    arrays = conditioned(world, variables, values, scattered=True)
    rows = [select(batch, len(array)) for array in arrays]
    return assign(world, variables, arrays, rows)


def set_value(
    rank: int, shared_vars: SharedVariables, values: Values, batch: Batch | None = None
) -> Pending | None:
    """Set the replicas of one rank.

    Parameters
    ----------
    rank : int
    shared_vars : shared variable, or list of these
    values : array-like or Data, or list of these
    batch : int, slice, 1-d array-like of int or bool, optional
        The rows of `values` to use.

    Raises
    ------
    TypeError
        If a value cannot be cast safely to the dtype of its variable, or has another ndim.
    ValueError
        If no function uses a variable.
    IndexError
        If there is no such rank, or `batch` names a row that does not exist.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> synk.fork(2, use_gpu=False)
    2
    >>> w = theano.shared(np.zeros(2), name="w")
    >>> f = synk.function([], w)  # the average over the ranks
    >>> synk.set_value(1, w, np.array([1.0, 2.0]))
    >>> f()
    array([0.5, 1. ])
    >>> synk.close()
    """
    world, variables, _ = resolve(shared_vars)
    rank = check_rank(world, rank)
    values = as_list(shared_vars, values, "values")
    arrays = conditioned(world, variables, values, scattered=batch is not None)
    rows = None if batch is None else [select(batch, len(array)) for array in arrays]
    return assign(world, variables, arrays, rows, rank)


class _Fetch(Command):
    """Send copies of one rank's replicas to the master."""

    def __init__(self, numbers, rank):
        self.numbers, self.rank = numbers, rank

    def run(self, here):
        if here.rank != self.rank:
            return None
        storages = [here.engine.storage(here.shareds[number]) for number in self.numbers]
        if here.is_master:
            return [np.array(here.engine.to_host(storage)) for storage in storages]
        copies = [here.store.empty(np.shape(one), one.dtype) for one in storages]
        for copy, one in zip(copies, storages):
            here.engine.read(one, copy)  # also of what is in the store, where others may write
        return [here.send(copy) for copy in copies]


def get_value(rank: int, shared_vars: SharedVariables) -> Result:
    """Return copies of the replicas of one rank.

    Parameters
    ----------
    rank : int
    shared_vars : shared variable, or list of these

    Returns
    -------
    numpy.ndarray, or list of these
        Of the shape of the variable on that rank; a list if `shared_vars` is one.

    Raises
    ------
    TypeError, ValueError
        If a variable is not a shared tensor, or no function uses it.
    IndexError
        If there is no such rank.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> synk.fork(2, use_gpu=False)
    2
    >>> w = theano.shared(np.zeros(2), name="w")
    >>> update = synk.function([], updates=[(w, w + 1)])
    >>> update()
    []
    >>> synk.get_value(1, w)
    array([1., 1.])
    >>> synk.close()
    """
    world, variables, single = resolve(shared_vars)
    rank = check_rank(world, rank)

    def finish(results):
        values = results[rank]
        if rank != world.master_rank:
            values = [world.here.store.get(handle).copy() for handle in values]
        return values[0] if single else values

    return submit(world, _Fetch(numbers_of(world, variables), rank), finish)


class _Shapes(Command):
    def __init__(self, numbers):
        self.numbers = numbers

    def run(self, here):
        return [np.shape(here.engine.storage(here.shareds[number])) for number in self.numbers]


def get_shapes(shared_vars: SharedVariables) -> Result:
    """Return the shapes of each variable's replicas.

    Parameters
    ----------
    shared_vars : shared variable, or list of these

    Returns
    -------
    list of tuple
        By rank; a list of such lists where a list was given.
    """
    world, variables, single = resolve(shared_vars)

    def finish(results):
        shapes = [list(by_rank) for by_rank in zip(*results)]
        return shapes[0] if single else shapes

    return submit(world, _Shapes(numbers_of(world, variables)), finish)


def get_lengths(shared_vars: SharedVariables) -> Result:
    """Return the lengths of each variable's replicas along axis 0.

    Parameters
    ----------
    shared_vars : shared variable, or list of these

    Returns
    -------
    list of int
        By rank; a list of such lists where a list was given.
    """
    world, variables, single = resolve(shared_vars)
    check_has_rows(world, variables, "get_lengths")

    def finish(results):
        lengths = [[shape[0] for shape in by_rank] for by_rank in zip(*results)]
        return lengths[0] if single else lengths

    return submit(world, _Shapes(numbers_of(world, variables)), finish)
