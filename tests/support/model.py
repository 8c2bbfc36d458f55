"""A reference model of the library in plain NumPy, without processes or shared memory.

It is derived from the documentation alone. The ranks' arrays are kept in lists. A `World` executes one
command, or several as in ``fuse()``, and returns what the calls return to the script.
"""

from abc import ABC, abstractmethod
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from oracle import combine, parts, selected


class RankError(Exception):
    """An exception that one rank raises on its own."""

    def __init__(self, rank, type_name):
        super().__init__(rank, type_name)
        self.rank, self.type_name = rank, type_name


class Formula(NamedTuple):
    """The computation of a function.

    ``compute(inputs, shared)`` takes a dictionary of inputs and a dictionary of shared variables, and
    returns the list of outputs and a dictionary of new values. Inputs and sliceable shared variables
    hold only some rows of the data.
    """

    name: str
    inputs: Tuple[str, ...]
    bcast: Tuple[str, ...]
    sliceable: Tuple[str, ...]
    ops: Sequence[Optional[str]]
    dtypes: Sequence[str]
    updates: Dict[str, Optional[str]]
    compute: Callable[[Dict[str, np.ndarray], Dict[str, np.ndarray]], Tuple[list, dict]]
    single: bool = False


class Argument(NamedTuple):
    """An input of a call: an array, and whether it has only the rows of one batch."""

    array: np.ndarray
    minibatch: bool = False


class World:
    """The ranks, and the values of the shared variables on each.

    `values` has a list of arrays for each variable, one per rank, and `rows` how many rows each rank
    had in the last call of each formula.
    """

    def __init__(self, size, master_rank):
        self.size, self.master_rank, self.ranks = size, master_rank, range(size)
        self.values: Dict[str, List[np.ndarray]] = {}
        self.rows: Dict[str, List[int]] = {}

    def set_everywhere(self, name, value):
        self.values[name] = [np.array(value) for _ in self.ranks]

    def set_on_master(self, name, value):
        self.values[name][self.master_rank] = np.array(value)

    def execute(self, commands):
        """Execute commands, and return their results.

        A rank that fails does not take part in the following commands. The others continue until a
        command needs all ranks. If ranks have failed, raise the error that a script would see: the
        master's, or else the error of the lowest rank.
        """
        results = [[None] * self.size for _ in commands]
        failed = {}
        for command, by_rank in zip(commands, results):
            if isinstance(command, Together):
                if failed:
                    break
                command.run(self)
                continue
            for rank in self.ranks:
                if rank not in failed:
                    try:
                        by_rank[rank] = command.run(self, rank)
                    except RankError as error:
                        failed[rank] = error
        if failed:
            raise failed.get(self.master_rank, failed[min(failed)])
        return [command.finish(self, by_rank) for command, by_rank in zip(commands, results)]


class SerialRank(ABC):
    """A command that each rank executes on its own."""

    @abstractmethod
    def run(self, world, rank):
        """Execute the command on one rank, and return this rank's argument for `finish`."""

    def finish(self, world, by_rank):
        return None


class Together(ABC):
    """A command in which all ranks must take part."""

    result: Any = None

    @abstractmethod
    def run(self, world):
        """Execute the command on all ranks, and set `result`."""

    def finish(self, world, by_rank):
        return self.result


class Call(SerialRank):
    """A call of a function. The constructor raises an exception if the arguments are invalid."""

    def __init__(self, world, formula, arguments, batch=None, batch_s=None, num_slices=1, subset=None):
        self.formula, self.num_slices = formula, num_slices
        self.subset = subset
        self.chosen = range(len(formula.ops)) if subset is None else subset
        self.bcast = {name: arguments[name].array for name in formula.bcast}
        self.batch_s = batch_s if isinstance(batch_s, list) else [batch_s] * world.size
        self.scattered = self.n_rows = None
        if formula.inputs:
            self._scatter(world, {name: arguments[name] for name in formula.inputs}, batch)
            masters = parts(range(self.n_rows), world.size)[world.master_rank]
            if not len(masters) and None in [formula.ops[index] for index in self.chosen]:
                raise ValueError("the master has no rows for an output of its own")

    def _scatter(self, world, arguments, batch):
        whole = [one.array for one in arguments.values() if not one.minibatch]
        whole = whole or [next(iter(arguments.values())).array]
        if len({len(array) for array in whole}) > 1:
            raise ValueError("unequal numbers of rows")
        self.n_rows = len(selected(batch, np.arange(len(whole[0]))))
        if not self.n_rows:
            raise ValueError("no rows")
        if any(one.minibatch and len(one.array) < self.n_rows for one in arguments.values()):
            raise ValueError("too few rows in a minibatch")
        self.scattered = {
            name: parts(
                one.array[: self.n_rows] if one.minibatch else selected(batch, one.array), world.size
            )
            for name, one in arguments.items()
        }

    def run(self, world, rank):
        formula = self.formula
        shared = {name: values[rank] for name, values in world.values.items()}
        columns = {name: values[rank] for name, values in (self.scattered or {}).items()}
        try:
            for name in formula.sliceable:
                columns[name] = selected(self.batch_s[rank], shared[name])
        except IndexError as error:
            raise RankError(rank, "IndexError") from error
        n_rows = min(map(len, columns.values()), default=1)
        world.rows.setdefault(formula.name, [0] * world.size)[rank] = n_rows
        outputs, news, weights = [], [], []
        for index in range(self.num_slices):
            own = {name: parts(rows, self.num_slices)[index] for name, rows in columns.items()}
            length = min(map(len, own.values()), default=1)
            if length:
                try:
                    some, new = formula.compute({**own, **self.bcast}, {**shared, **own})
                except (IndexError, ValueError) as error:
                    raise RankError(rank, type(error).__name__) from error
                outputs.append(some)
                news.append(new)
                weights.append(length)
        if not weights:
            return 0, None
        for name, op in formula.updates.items():
            values = [np.asarray(new[name]) for new in news]
            dtype = world.values[name][rank].dtype
            new = values[0] if len(values) == 1 else combine(op, values, weights)
            world.values[name][rank] = np.asarray(new).astype(dtype)
        return n_rows, [combine(op, values, weights) for op, values in zip(formula.ops, zip(*outputs))]

    def finish(self, world, by_rank):
        active = [rank for rank in world.ranks if by_rank[rank][0]]
        if not active:
            raise ValueError("no rank had any rows")
        weights = [by_rank[rank][0] for rank in active]
        outputs = []
        for index in self.chosen:
            op, dtype = self.formula.ops[index], self.formula.dtypes[index]
            if op is None and world.master_rank not in active:
                raise ValueError("the master had no rows for an output of its own")
            of = active if op else [world.master_rank]
            values = [by_rank[rank][1][index] for rank in of]
            outputs.append(np.asarray(combine(op, values, weights)).astype(dtype))
        return outputs[0] if self.formula.single and self.subset is None else outputs


def call_on_master(world, formula, arguments):
    """Return the outputs of ``as_theano``, which uses all rows and updates only the master."""
    alone = World(1, 0)
    alone.values = {name: [values[world.master_rank]] for name, values in world.values.items()}
    shared = {name: values[0] for name, values in alone.values.items()}
    inputs = {name: one.array for name, one in arguments.items()}
    try:
        outputs, news = formula.compute(inputs, shared)
    except (IndexError, ValueError) as error:
        raise RankError(world.master_rank, type(error).__name__) from error
    for name, new in news.items():
        world.set_on_master(name, np.asarray(new).astype(shared[name].dtype))
    outputs = [np.asarray(one).astype(dtype) for one, dtype in zip(outputs, formula.dtypes)]
    return outputs[0] if formula.single else outputs


class Assign(SerialRank):
    """Assigns arrays to all ranks or to one rank, or splits them over the ranks."""

    def __init__(self, world, arrays, batch=None, only=None, split=False):
        self.only = only
        rows = {
            name: selected(batch, array) if split or batch is not None else array
            for name, array in arrays.items()
        }
        self.arrays = {
            name: parts(array, world.size) if split else [array] * world.size
            for name, array in rows.items()
        }

    def run(self, world, rank):
        if self.only in (None, rank):
            for name, by_rank in self.arrays.items():
                world.values[name][rank] = np.array(by_rank[rank])


class Fetch(SerialRank):
    def __init__(self, names, rank):
        self.names, self.rank = names, rank

    def run(self, world, rank):
        return [world.values[name][rank].copy() for name in self.names]

    def finish(self, world, by_rank):
        return by_rank[self.rank]


class Shapes(SerialRank):
    def __init__(self, names):
        self.names = names

    def run(self, world, rank):
        return [world.values[name][rank].shape for name in self.names]

    def finish(self, world, by_rank):
        return [list(shapes) for shapes in zip(*by_rank)]


class Broadcast(Together):
    def __init__(self, names):
        self.names = names

    def run(self, world):
        for name in self.names:
            world.set_everywhere(name, world.values[name][world.master_rank])


class Gather(Together):
    def __init__(self, names, nd_up):
        self.names, self.nd_up = names, nd_up

    def run(self, world):
        self.result = [self._join(world.values[name]) for name in self.names]

    def _join(self, values):
        if self.nd_up == 0:
            return np.concatenate(values)
        if len({value.shape for value in values}) == 1:
            return np.stack(values)
        return [value.copy() for value in values]


class AllGather(Together):
    def __init__(self, names):
        self.names = names

    def run(self, world):
        for name in self.names:
            world.set_everywhere(name, np.concatenate(world.values[name]))


class Reduce(Together):
    """Reduces variables; the result goes to "all" ranks, the "master", or a "new" array.

    `weights` is None, a list, or the function whose last numbers of rows are the weights.
    """

    def __init__(self, names, op, target, weights=None):
        self.names, self.op, self.target, self.weights = names, op, target, weights

    def run(self, world):
        weights = self.weights
        if isinstance(weights, Formula):
            weights = world.rows[weights.name]
        if any(len({value.shape for value in world.values[name]}) > 1 for name in self.names):
            raise ValueError("unequal shapes")
        if self.op == "avg" and weights is not None and not any(weights):
            raise ValueError("no weight")
        reduced = {name: self._reduce(world.values[name], weights) for name in self.names}
        if self.target == "new":
            self.result = list(reduced.values())
        for name, value in reduced.items():
            if self.target == "all":
                world.set_everywhere(name, value)
            elif self.target == "master":
                world.set_on_master(name, value)

    def _reduce(self, values, weights):
        weights = weights if self.op == "avg" else None
        return np.asarray(combine(self.op, values, weights)).astype(values[0].dtype)


class Data:
    """The model of a `Data`: an array of fixed dtype. ``array`` is None after ``free()``."""

    def __init__(self, array, minibatch=False):
        self.array, self.minibatch = np.array(array), minibatch
        self.dtype = self.array.dtype

    def set_value(self, value):
        self.array = np.array(value).astype(self.dtype)

    def set_shape(self, shape):
        new = np.zeros(shape, self.dtype)
        if self.array is None:
            self.array = new
            return
        both = tuple(slice(min(pair)) for pair in zip(shape, self.array.shape))
        new[both] = self.array[both]
        self.array = new

    def free(self):
        self.array = None
