"""Reading and writing the ranks' replicas of shared variables, each rank for itself."""

from __future__ import annotations

import numpy as np

from synkhronos._arguments import in_shared_memory
from synkhronos._fuse import Pending
from synkhronos._here import Command
from synkhronos._partition import as_slice, select, share
from synkhronos._references import open_reference
from synkhronos._shared_variables import (
    as_list,
    check_has_rows,
    check_rank,
    conditioned,
    numbers_of,
    resolve,
    submit,
)
from synkhronos._typing import Batch, Result, SharedVariables, Values


class Assign(Command):
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
            here.engine.write(here.shareds[number], value)


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
    TypeError, ValueError, IndexError
    """
    world, variables, _ = resolve(shared_vars)
    if values is None:
        missing = [str(variable) for variable in variables if variable not in world.bound]
        if missing:
            raise ValueError(
                f"scatter: no values given, and no data bound to {', '.join(missing)}; give values, "
                f"or bind data with set_shmems()"
            )
        values = [world.bound[variable] for variable in variables]
    else:
        values = as_list(shared_vars, values, "values")
    arrays = conditioned(world, variables, values, scattered=True)
    rows = [select(batch, len(array)) for array in arrays]
    datas = [in_shared_memory(world, array) for array in arrays]
    command = Assign(numbers_of(world, variables), [data.reference() for data in datas], rows)
    kept = [data.data for data in datas]
    return submit(world, command, lambda results, kept=kept: None)


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
    """
    world, variables, _ = resolve(shared_vars)
    rank = check_rank(world, rank)
    values = as_list(shared_vars, values, "values")
    arrays = conditioned(world, variables, values, scattered=batch is not None)
    rows = None if batch is None else [select(batch, len(array)) for array in arrays]
    datas = [in_shared_memory(world, array) for array in arrays]
    numbers = numbers_of(world, variables)
    command = Assign(numbers, [data.reference() for data in datas], rows, rank)
    kept = [data.data for data in datas]
    return submit(world, command, lambda results, kept=kept: None)


class _Fetch(Command):
    """Bring copies of one rank's replicas to the master."""

    def __init__(self, numbers, rank):
        self.numbers, self.rank = numbers, rank

    def run(self, here):
        if here.rank != self.rank:
            return None
        storages = [here.engine.storage(here.shareds[number]) for number in self.numbers]
        if here.is_master:
            return [np.array(here.engine.to_host(storage)) for storage in storages]
        placed = [here.memory.empty(np.shape(one), one.dtype) for one in storages]
        for array, one in zip(placed, storages):
            here.engine.read(one, array)  # also of what is in shared memory, where others may write
        here.outbox.extend(placed)
        return [here.memory.reference(array) for array in placed]


def get_value(rank: int, shared_vars: SharedVariables) -> Result:
    """Return copies of the replicas of one rank.

    Parameters
    ----------
    rank : int
    shared_vars : shared variable, or list of these

    Returns
    -------
    numpy.ndarray, or list of these where a list was given
    """
    world, variables, single = resolve(shared_vars)
    rank = check_rank(world, rank)

    def finish(results):
        values = results[rank]
        if rank != world.master_rank:
            values = [world.here.memory.open(reference).copy() for reference in values]
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
