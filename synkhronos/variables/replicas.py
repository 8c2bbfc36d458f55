"""Reading and writing the ranks' replicas of shared variables, without communication among ranks.

Every call on shared variables begins here: its variables and values are checked, and converted to the
numbers and arrays that the ranks use.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, Callable, Sequence, overload

import numpy as np

from synkhronos._checks import check_int
from synkhronos._text import listed, shortened
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
from synkhronos.arithmetic.conversion import condition, in_order_of
from synkhronos.arithmetic.partition import select, share, take_rows
from synkhronos.arrays.binding import bound_data
from synkhronos.arrays.data import Data, as_data
from synkhronos.engines.base import Engine, dims_of
from synkhronos.functions.arguments import shapes
from synkhronos.functions.replica_tracker import replica_tracker_of
from synkhronos.functions.replicate import replicate
from synkhronos.stores.handle import Handle, RequiredRows
from synkhronos.world.rank_state import Ask, Command, RankState
from synkhronos.world.schedule import Pending
from synkhronos.world.world import World, current_world, with_call_lock


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


def numbers_of(world: World, variables: Sequence[SharedVariable]) -> list[int]:
    """Return the numbers by which the ranks know variables, once all ranks have all that is new."""
    numbers = [world.registry.add_shared(variable) for variable in variables]
    replicate(world)
    return numbers


def as_list(shared_vars: SharedVariables, values: Values) -> list[Any]:
    """Return one value for each variable. If `shared_vars` is a list, so must `values` be."""
    if not isinstance(shared_vars, (list, tuple)):
        return [values]
    if not isinstance(values, (list, tuple)) or len(values) != len(shared_vars):
        got = len(values) if isinstance(values, (list, tuple)) else type(values).__name__
        raise ValueError(f"values: expected one for each variable, {len(shared_vars)}, got {got}")
    return list(values)


def conditioned(
    engine: Engine, variables: Sequence[SharedVariable], values: Sequence[Any], scattered: bool = False
) -> list[AnyArray | Data]:
    """Convert values to arrays or `Data` with the dtypes and ndims of the variables."""
    arrays: list[AnyArray | Data] = []
    for variable, value in zip(variables, values):
        kind = engine.type_of(variable)
        label = f"value for {variable}"
        value = in_order_of(dims_of(variable), value, label)
        array: AnyArray | Data = condition(value, kind.dtype, kind.ndim, False, label)
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


# Values that are set or returned


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
        own = self.needs(range(state.rank, state.rank + 1), state.size)
        for number, (handle, rows, *_) in zip(self.numbers, own):
            if rows is None:
                value = state.store.get(handle)
            else:
                value = take_rows(*state.store.find(handle, rows))
            state.engine.write(state.shareds[number], value)

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
    pending: Pending | None = world.submit(command, lambda results: None, used)
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
    return world.submit(Ask(fetch, numbers, rank), finish, variables)


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
    return _of_shapes(shared_vars, tuple)


def _of_shapes(
    shared_vars: SharedVariables, of: Callable[[tuple[int, ...]], Any], with_rows: str = ""
) -> Any:
    """Return the value of ``of(shape)`` for the replica on each rank; `with_rows` names the call."""
    world, variables, single = resolve(shared_vars)
    if with_rows:
        check_has_rows(world.rank_state.engine, variables, with_rows)

    def finish(results: Sequence[Any]) -> Any:
        found = [[of(shape) for shape in by_rank] for by_rank in zip(*results)]
        return found[0] if single else found

    return world.submit(Ask(shapes, numbers_of(world, variables)), finish, variables)


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
    return _of_shapes(shared_vars, operator.itemgetter(0), "get_lengths")
