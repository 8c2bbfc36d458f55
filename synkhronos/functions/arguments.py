"""The arguments of a call: matched to the function's inputs, checked, and converted to a command.

All wrong arguments are detected here, in the master, before any rank starts to compute.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence, TypeVar

import numpy as np

from synkhronos._checks import check_int, is_int
from synkhronos._errors import ClosedError
from synkhronos._text import listed
from synkhronos._typing import ArrayLike, Batch, Rows
from synkhronos.arithmetic.conversion import condition, in_order_of
from synkhronos.arithmetic.operations import OPERATIONS
from synkhronos.arithmetic.partition import select, share
from synkhronos.arrays.binding import bound_data
from synkhronos.arrays.data import Data, as_data
from synkhronos.arrays.objects import ObjectData, SparseData, to_sparse
from synkhronos.engines.base import dims_of
from synkhronos.functions.call import Argument, CallFunction
from synkhronos.functions.replica import Replica
from synkhronos.functions.replicate import replicate
from synkhronos.functions.signature import Input
from synkhronos.world.rank_state import Ask, RankState
from synkhronos.world.world import World

#: In place of the value of an input for which a call gives none. None may be a value.
MISSING: Any = object()

_Call = TypeVar("_Call", bound=CallFunction)
_KEYWORDS = ("output_subset", "batch", "batch_s", "num_slices")


def in_order(function: Any, args: Sequence[ArrayLike], named: Mapping[str, ArrayLike]) -> list[Any]:
    """Return the value of each input, given by position or by name, or `MISSING`."""
    inputs = function.inputs
    if len(args) > len(inputs):
        raise TypeError(f"{function!r}: expected at most {len(inputs)} inputs, got {len(args)}")
    values = [*args, *[MISSING] * (len(inputs) - len(args))]
    for name, value in named.items():
        positions = [i for i, variable in enumerate(inputs) if variable.name == name]
        if not positions:
            names = [variable.name for variable in inputs]
            raise TypeError(f"{function!r}: no input is named {name!r}; inputs: {listed(names)}")
        if len(positions) > 1:
            raise TypeError(
                f"{function!r}: {len(positions)} inputs are named {name!r}; give these by position"
            )
        if values[positions[0]] is not MISSING:
            raise TypeError(f"{function!r}: input {name!r} is given twice")
        values[positions[0]] = value
    return values


def match(
    world: World, function: Any, args: Sequence[ArrayLike], named: Mapping[str, ArrayLike]
) -> list[Any]:
    """Return, for each input, a `Data` or a value of its type."""
    inputs = function.inputs
    if named or len(args) != len(inputs):
        args = filled(world, function, in_order(function, args, named))
    return [
        _check_data(world, value, variable) if type(value) is Data else to_value(value, variable)
        for value, variable in zip(args, inputs)
    ]


def filled(world: World | None, function: Any, values: list[Any]) -> list[Any]:
    """Use the bound data, or the default value, of each input for which the call gives no value.

    Without a world, for a program, no data is bound.
    """
    for position, spec in enumerate(function.inputs):
        if values[position] is MISSING:
            bound = None if world is None else bound_data(world, spec.variable)
            default = MISSING if spec.value is None else spec.value
            values[position] = default if bound is None else bound
    missing = [variable for variable, value in zip(function.inputs, values) if value is MISSING]
    if missing:
        remedy = "give one" if world is None else "give one, or bind data with set_shmems()"
        if any(item.name in _KEYWORDS for item in missing):
            remedy = f"give it by position: {', '.join(_KEYWORDS)} are keywords of every call"
        labels = listed(item.label for item in missing)
        raise TypeError(f"{function!r}: no value for {labels}; {remedy}")
    return values


def _check_data(world: World, value: Data, spec: Input) -> Data:
    if value._world is not world:
        raise ClosedError(f"{spec.label}: the processes of this Data were closed")
    kind = spec.type
    if kind.format != "dense":
        raise TypeError(f"{spec.label}: expected a value for a {kind.format} input, got a Data")
    if value.dtype != kind.dtype or value.ndim != kind.ndim:
        raise TypeError(
            f"{spec.label}: expected {kind.dtype} with {kind.ndim} dimensions, got Data of "
            f"{value.dtype} with {value.ndim}"
        )
    _check_extents(value.shape, spec)
    return value


def to_value(value: Any, spec: Input) -> Any:
    """Return an array, or an object, of the type of an input."""
    kind = spec.type
    if kind.format == "object":
        return value
    if kind.format != "dense":
        return to_sparse(value, kind.format, kind.dtype, spec.downcast, spec.label)
    value = in_order_of(dims_of(spec.variable), value, spec.label)
    remedy = "convert it"
    if not spec.downcast:
        remedy += ", or build the function with allow_input_downcast=True"
    downcast = spec.downcast and not np.iscomplexobj(value)  # as Theano does
    array = condition(value, kind.dtype, kind.ndim, downcast, spec.label, remedy)
    _check_extents(array.shape, spec)
    return array


def in_store(world: World, spec: Input, value: Any) -> Data | SparseData | ObjectData:
    """Return a matched value in a form in which every rank can access it."""
    if type(value) is Data or spec.type.format == "dense":
        return as_data(world, value)
    if spec.type.format == "object":
        return ObjectData(value, spec.label)
    return SparseData(world, value)


def _check_extents(shape: tuple[int, ...], spec: Input) -> None:
    for axis, extent in spec.fixed.items():
        if shape[axis] != extent:
            raise TypeError(f"{spec.label}: expected extent {extent} on axis {axis}, got shape {shape}")


def compile_call(
    world: World,
    function: Any,
    args: Sequence[ArrayLike],
    named: Mapping[str, ArrayLike],
    output_subset: Sequence[int] | None,
    batch: Batch | None,
    batch_s: Batch | Sequence[Batch | None] | None,
    num_slices: int,
) -> tuple[CallFunction, list[Any], bool]:
    """Return the command of a call, its data, and whether the call has given all of these."""
    values = match(world, function, args, named)
    datas = [in_store(world, *pair) for pair in zip(function.inputs, values)]
    state, replica = world.rank_state, function.replica
    options = batch, num_slices, output_subset
    command = make_call(CallFunction, state, function, replica, datas, *options)
    if command.rows is not None:
        _check_master_takes_part(world, function, command)
    if batch_s is not None:
        command.batch_s = _check_batch_s(world, function, batch_s)
    return command, datas, all([type(value) is Data for value in values])


def make_call(
    kind: type[_Call],
    state: RankState,
    function: Any,
    replica: Replica,
    datas: Sequence[Any],
    batch: Batch | None,
    num_slices: int,
    subset: Sequence[int] | None,
) -> _Call:
    """Return a command of some kind, a call on data that has been matched to the inputs."""
    num_slices = check_int(num_slices, "num_slices", 1)
    rows = select_rows(function, datas, batch)
    if num_slices > 1:
        check_slicing(state, function, replica)
    if subset is not None:
        subset = check_indices(subset, len(replica.output_modes), function.form)
    pairs = zip(function.inputs, datas)
    given = tuple([Argument(data.handle(), spec.axis, data.minibatch) for spec, data in pairs])
    return kind(replica.number, given, rows, None, num_slices, subset)


def select_rows(function: Any, datas: Sequence[Any], batch: Batch | None) -> Rows | None:
    """Return the rows to divide among the ranks; None if no input is split."""
    split = [(item, data) for item, data in zip(function.inputs, datas) if item.axis is not None]
    if not split:
        if batch is not None:
            raise ValueError(f"{function!r}: batch was given, but no input is scattered")
        return None
    lengths = [data.shape[item.axis] for item, data in split]
    whole = {length for length, (_, data) in zip(lengths, split) if not data.minibatch}
    if not whole:  # with a batch, the minibatch data may be longer
        whole = set(lengths[: None if batch is None else 1])
    if len(whole) > 1:
        found = listed(f"{item.label}: {n}" for n, (item, _) in zip(lengths, split))
        raise ValueError(f"{function!r}: expected inputs of the same number of rows, got {found}")
    rows = select(batch, whole.pop())
    if not len(rows):
        raise ValueError(f"{function!r}: no rows to compute on (batch={batch!r})")
    for length, (item, data) in zip(lengths, split):
        if data.minibatch and length < len(rows):
            raise ValueError(
                f"{item.label}: expected minibatch data of {len(rows)} rows, the length of the "
                f"batch, got {length}"
            )
    return rows


def check_slicing(state: RankState, function: Any, replica: Replica) -> None:
    """Raise if the function cannot be computed in slices."""
    if not replica.has_rows:
        raise ValueError(f"{function!r}: num_slices was given, but no input can be sliced")
    for reason in function.not_accumulated:
        raise TypeError(f"{function!r}: num_slices: {reason}")
    for number, op in replica.updates:
        shared = state.shareds[number]
        if op in OPERATIONS:
            dtype = state.engine.type_of(shared).dtype
            OPERATIONS[op].check_dtype(dtype, f"the update of {shared} over slices")


def check_indices(subset: Sequence[Any], n_outputs: int, form: list[str] | bool) -> list[int]:
    """Return `output_subset` as a list of ints; raise if an index is out of range."""
    try:
        indices = list(subset)
    except TypeError as error:
        raise TypeError(f"output_subset: expected a list of ints, got {subset!r}") from error
    for position, index in enumerate(indices):
        if type(form) is list and isinstance(index, str):
            if index not in form:
                raise IndexError(f"output_subset: expected keys of {form}, got {index!r}")
            index = indices[position] = form.index(index)
        if not is_int(index):
            raise TypeError(f"output_subset: expected a list of ints, got {subset!r}")
        if not 0 <= index < n_outputs:
            raise IndexError(f"output_subset: expected indices below {n_outputs}, got {index}")
    return [int(index) for index in indices]


def _check_master_takes_part(world: World, function: Any, command: Any) -> None:
    modes, n_rows = function.replica.output_modes, len(command.rows)
    most, own = (len(range(*share(n_rows, world.size, rank))) for rank in (0, world.master_rank))
    needed = min(command.num_slices, most)
    if function.replica.uses_master and own < needed:
        raise ValueError(
            f"{function!r}: its graph uses the master's value (synk.ops.broadcast), but of {n_rows} "
            f"rows rank {world.master_rank}, the master, gets {own}, and needs {needed}, one for each "
            f"slice"
        )
    for index in command.chosen(range(len(modes))) if not own else ():
        if modes[index] is None:
            raise ValueError(
                f"{function!r}: output {index} is the master's own value (op None), but of "
                f"{n_rows} rows rank {world.master_rank}, the master, gets none"
            )


def _check_batch_s(world: World, function: Any, batch_s: Any) -> list[Batch | None]:
    """Return a list with the rows of each rank, checked as far as possible."""
    if not function.replica.sliceable:
        raise ValueError(f"{function!r}: batch_s was given, but there are no sliceable_shareds")
    each = isinstance(batch_s, (list, tuple)) and any(
        item is None or isinstance(item, (slice, range, list, tuple, np.ndarray, Data))
        for item in batch_s
    )
    if each and len(batch_s) != world.size:
        raise ValueError(f"batch_s: expected one batch per rank, {world.size}, got {len(batch_s)}")
    batches = list(batch_s) if each else [batch_s] * world.size
    batches = [np.array(batch) if isinstance(batch, (range, Data)) else batch for batch in batches]
    for batch in batches:
        if isinstance(batch, slice):
            select(batch, 0, "batch_s")
    listed = not all(batch is None or isinstance(batch, slice) for batch in batches)
    if listed and not world.is_recording:  # inside fuse() the lengths may change first
        replicate(world)
        by_rank = world.run(Ask(shapes, function.replica.sliceable))  # only the ranks know the lengths
        for rank, (batch, own) in enumerate(zip(batches, by_rank)):
            for shape in own:
                select(batch, shape[0], f"batch_s for rank {rank}")
    return batches


def shapes(state: RankState, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes of this rank's replicas."""
    return [np.shape(array) for array in state.storages(numbers)]
