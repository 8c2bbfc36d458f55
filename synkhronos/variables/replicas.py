"""Reading and writing the ranks' replicas of shared variables, without communication among ranks."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Sequence, overload

import numpy as np

from synkhronos._text import listed
from synkhronos._typing import (
    AnyArray,
    Batch,
    ComputedArray,
    ComputedList,
    Rows,
    SharedVariable,
    SharedVariables,
    Values,
)
from synkhronos.arithmetic.partition import select, share
from synkhronos.arrays.binding import bound_data
from synkhronos.arrays.data import Data, as_data
from synkhronos.functions.arguments import shapes
from synkhronos.functions.replica_tracker import replica_tracker_of
from synkhronos.stores.handle import Handle, RequiredRows
from synkhronos.variables.arguments import (
    as_list,
    check_has_rows,
    check_rank,
    conditioned,
    numbers_of,
    resolve,
    submit,
)
from synkhronos.world.rank_state import Ask, Command, RankState
from synkhronos.world.schedule import Pending
from synkhronos.world.world import World, with_call_lock


@dataclasses.dataclass(eq=False, repr=False)
class Assign(Command):
    """Set replicas to stored arrays: to all rows, or to each rank's share of some rows.

    Parameters
    ----------
    numbers : list of int
        The numbers of the variables.
    handles : list of Handle
        Handles to the arrays.
    rows : list of (range or numpy.ndarray), optional
        For each array, the rows that are divided among the ranks.
    only : int, optional
        The only rank that is affected.
    """

    numbers: Sequence[int]
    handles: Sequence[Handle]
    rows: Sequence[Rows] | None = None
    only: int | None = None

    def run(self, state: RankState) -> None:
        if self.only not in (None, state.rank):
            return
        for position, number in enumerate(self.numbers):
            state.engine.write(state.shareds[number], self._value(state, position))

    def needs(self, ranks: range, size: int) -> list[RequiredRows]:
        if self.only is not None and self.only not in ranks:
            return []
        if self.rows is None:
            return [RequiredRows(handle) for handle in self.handles]
        needed = []
        for handle, rows in zip(self.handles, self.rows):
            if self.only is None:
                start = share(len(rows), size, ranks[0])[0]
                rows = rows[start : share(len(rows), size, ranks[-1])[1]]
            needed.append(RequiredRows(handle, rows))
        return needed

    def _value(self, state: RankState, position: int) -> AnyArray:
        handle = self.handles[position]
        if self.rows is None:
            return state.store.get(handle)
        rows = self.rows[position]
        if self.only is None:
            start, stop = share(len(rows), state.size, state.rank)
            rows = rows[start:stop]
        return state.store.rows(handle, rows)


def assign(
    world: World,
    variables: Sequence[SharedVariable],
    arrays: Sequence[AnyArray | Data],
    rows: Sequence[Rows] | None = None,
    only: int | None = None,
) -> Pending | None:
    """Set replicas to arrays or `Data` of matching types, as `Assign` does."""
    datas = [as_data(world, array) for array in arrays]
    command = Assign(numbers_of(world, variables), [data.handle() for data in datas], rows, only)
    used = variables, [data.stored for data in datas]
    pending: Pending | None = submit(world, command, lambda results: None, used)
    return pending


@with_call_lock
def scatter(
    shared_vars: SharedVariables, values: Values | None = None, batch: Batch | None = None
) -> Pending | None:
    """Split rows of `values` over the ranks, and set each rank's replica to its share.

    The shares are as even as possible; the lower ranks get the longer shares.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
        Each must be used by a function built with `function`.
    values : array-like or Data, or list of these, optional
        One value for each variable, of its ndim and of a dtype that can be cast safely to its dtype. By
        default the data bound to the variable by `set_shmems`.
    batch : int, slice, 1-d array-like of int or bool, optional
        The rows of `values` to use, as in a call of a function; all rows by default.

    Raises
    ------
    TypeError
        If a variable is not a shared tensor, or a value has the wrong ndim or cannot be cast safely.
    ValueError
        If no function uses a variable, its type has no rows, or it has neither a value nor bound data.
    IndexError
        If `batch` contains a row that does not exist.
    MemoryError
        If there is too little shared memory for the values.

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
        missing = [str(item) for item, value in zip(variables, values) if value is None]
        if missing:
            raise ValueError(
                f"scatter: no values given, and no data bound to {listed(missing)}; give values, "
                f"or bind data with set_shmems()"
            )
    else:
        values = as_list(shared_vars, values)
    arrays = conditioned(world.rank_state.engine, variables, values, scattered=True)
    rows = [select(batch, len(array)) for array in arrays]
    replica_tracker_of(world).set_apart(numbers_of(world, variables), scattered=True)
    return assign(world, variables, arrays, rows)


@with_call_lock
def set_value(
    rank: int, shared_vars: SharedVariables, values: Values, batch: Batch | None = None
) -> Pending | None:
    """Set the replicas of one rank.

    Parameters
    ----------
    rank : int
        The rank, from 0 to ``n - 1``.
    shared_vars : shared variable, or list of these
        Each must be used by a function built with `function`.
    values : array-like or Data, or list of these
        One value for each variable, of its ndim and of a dtype that can be cast safely to its dtype.
    batch : int, slice, 1-d array-like of int or bool, optional
        The rows of `values` to use; all rows by default.

    Raises
    ------
    TypeError
        If a variable is not a shared tensor, a value has the wrong ndim or cannot be cast safely, or
        `rank` is not an int.
    ValueError
        If no function uses a variable, or the number of values is wrong.
    IndexError
        If there is no such rank, or `batch` contains a row that does not exist.
    MemoryError
        If there is too little shared memory for the values.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> synk.fork(2, use_gpu=False)
    2
    >>> w = theano.shared(np.zeros(2), name="w")
    >>> f = synk.function([], w)  # the mean over the ranks
    >>> synk.set_value(1, w, np.array([1.0, 2.0]))
    >>> f()
    array([0.5, 1. ])
    >>> synk.close()
    """
    world, variables, _ = resolve(shared_vars)
    rank = check_rank(world, rank)
    values = as_list(shared_vars, values)
    arrays = conditioned(world.rank_state.engine, variables, values, scattered=batch is not None)
    rows = None if batch is None else [select(batch, len(array)) for array in arrays]
    replica_tracker_of(world).set_apart(numbers_of(world, variables), scattered=False)
    return assign(world, variables, arrays, rows, rank)


def fetch(state: RankState, numbers: Sequence[int], rank: int) -> Sequence[AnyArray | Handle] | None:
    """Send copies of one rank's replicas to the master."""
    if state.rank != rank:
        return None
    arrays = state.storages(numbers)
    if state.is_master:
        return [np.array(state.engine.to_host(array)) for array in arrays]
    copies = [state.store.empty(np.shape(item), item.dtype) for item in arrays]
    for copy, item in zip(copies, arrays):
        state.engine.read(item, copy)  # a copy even if it is in the store, where others may write
    return [state.send(copy) for copy in copies]


@overload
def get_value(rank: int, shared_vars: Sequence[SharedVariable]) -> ComputedList[AnyArray]: ...


@overload
def get_value(rank: int, shared_vars: SharedVariable) -> ComputedArray: ...


@with_call_lock
def get_value(rank: int, shared_vars: SharedVariables) -> Any:
    """Return copies of the replicas of one rank.

    Parameters
    ----------
    rank : int
        The rank, from 0 to ``n - 1``.
    shared_vars : shared variable, or list of these
        Each must be used by a function built with `function`.

    Returns
    -------
    numpy.ndarray, or list of these
        The values, in the shape and dtype of the variable on that rank; a list if `shared_vars` is
        a list.

    Raises
    ------
    TypeError
        If a variable is not a shared tensor, or `rank` is not an int.
    ValueError
        If no function uses a variable, or a variable is given twice.
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

    def finish(results: Sequence[Any]) -> Any:
        values = results[rank]
        if rank != world.master_rank:
            values = [world.rank_state.store.get(handle).copy() for handle in values]
        return values[0] if single else values

    numbers = numbers_of(world, variables)
    replica_tracker_of(world).compared(numbers)
    return submit(world, Ask(fetch, numbers, rank), finish, variables)


@overload
def get_shapes(shared_vars: Sequence[SharedVariable]) -> ComputedList[list[tuple[int, ...]]]: ...


@overload
def get_shapes(shared_vars: SharedVariable) -> ComputedList[tuple[int, ...]]: ...


@with_call_lock
def get_shapes(shared_vars: SharedVariables) -> Any:
    """Return the shapes of the replicas of a shared variable.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
        Each must be used by a function built with `function`.

    Returns
    -------
    list of tuple of int
        The shape on each rank. If `shared_vars` is a list, a list with such an item for each
        variable.

    Raises
    ------
    TypeError
        If a variable is not a shared tensor.
    ValueError
        If no function uses a variable, or a variable is given twice.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> synk.fork(2, use_gpu=False)
    2
    >>> rows = theano.shared(np.zeros((1, 2)), name="rows")
    >>> f = synk.function([], rows.sum())
    >>> synk.scatter(rows, np.zeros((5, 2)))
    >>> synk.get_shapes(rows)
    [(3, 2), (2, 2)]
    >>> synk.close()
    """
    world, variables, single = resolve(shared_vars)
    return _of_shapes(world, variables, single, lambda shape: shape)


def _of_shapes(
    world: World, variables: Sequence[SharedVariable], single: bool, of: Callable[[tuple[int, ...]], Any]
) -> Any:
    """Return the value of ``of(shape)`` for the replica on each rank."""

    def finish(results: Sequence[Any]) -> Any:
        found = [[of(shape) for shape in by_rank] for by_rank in zip(*results)]
        return found[0] if single else found

    return submit(world, Ask(shapes, numbers_of(world, variables)), finish, variables)


@overload
def get_lengths(shared_vars: Sequence[SharedVariable]) -> ComputedList[list[int]]: ...


@overload
def get_lengths(shared_vars: SharedVariable) -> ComputedList[int]: ...


@with_call_lock
def get_lengths(shared_vars: SharedVariables) -> Any:
    """Return the number of rows of the replicas of a shared variable.

    Parameters
    ----------
    shared_vars : shared variable, or list of these
        Each must be used by a function built with `function`.

    Returns
    -------
    list of int
        The length of axis 0 on each rank. If `shared_vars` is a list, a list with such an item for each
        variable.

    Raises
    ------
    TypeError
        If a variable is not a shared tensor.
    ValueError
        If no function uses a variable, a variable is given twice, or a variable has no axis 0.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> synk.fork(2, use_gpu=False)
    2
    >>> rows = theano.shared(np.zeros((1, 2)), name="rows")
    >>> f = synk.function([], rows.sum())
    >>> synk.scatter(rows, np.zeros((5, 2)))
    >>> synk.get_lengths(rows)
    [3, 2]
    >>> synk.close()
    """
    world, variables, single = resolve(shared_vars)
    check_has_rows(world.rank_state.engine, variables, "get_lengths")
    return _of_shapes(world, variables, single, lambda shape: shape[0])
