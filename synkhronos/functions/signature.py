"""The inputs, outputs and updates of a function: as a script gives them, checked, in a common form.

`In` and `Out` are variables with options, as Theano's classes of these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from synkhronos._checks import check_extent, check_list, check_string
from synkhronos._text import shortened
from synkhronos._typing import OutputOp, SharedVariable, Variable
from synkhronos.arithmetic.conversion import as_array
from synkhronos.arithmetic.operations import GATHER, OPERATIONS, find_operation, parse_output_mode
from synkhronos.engines.base import Engine, TensorType, dims_of, name_of


class In:
    """An input of a function, with options. A ``theano.In`` may be given instead.

    Parameters
    ----------
    variable : variable
        The variable of the graph.
    axis : int or str, default: 0
        The axis along which the value is split over the ranks: 1 for data whose axis 0 is time. The
        `batch` of a call then selects along this axis. A dimension of PyTensor's ``xtensor`` has a name.
    value : array-like, optional
        The value to use if a call gives none. None stands for no value, as in ``theano.In``.
    name : str, optional
        The keyword of this input in calls; by default the name of the variable.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano.tensor as T
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x = T.dmatrix("x")  # of shape (time, rows)
    >>> f = synk.function([synk.In(x, axis=1)], synk.Out(x.cumsum(axis=0), "gather", axis=1))
    >>> f(np.ones((2, 3)))  # two columns on this process, one on the worker
    array([[1., 1., 1.],
           [2., 2., 2.]])
    >>> synk.close()
    """

    def __init__(
        self, variable: Variable, axis: int | str = 0, value: Any = None, name: str | None = None
    ) -> None:
        if name is not None:
            check_string(name, "In: name")
        self.variable = variable
        self.axis = _axis_of(variable, axis, "In: axis")
        self.value = value
        self.name = name


class Out:
    """An output of a function, with options. A ``theano.Out`` may be given instead.

    Parameters
    ----------
    variable : variable
        The variable of the graph.
    op : str or None, default: "avg"
        As in the pairs ``(variable, op)`` of `function`.
    axis : int or str, default: 0
        With ``"gather"``, the axis along which the values of the ranks are concatenated.
    """

    def __init__(self, variable: Variable, op: OutputOp | None = "avg", axis: int | str = 0) -> None:
        self.variable = variable
        self.op = op
        self.axis = _axis_of(variable, axis, "Out: axis")


def _axis_of(variable: Variable, axis: int | str, label: str) -> int:
    """Return the number of an axis, which may be given by the name of the dimension."""
    if not isinstance(axis, str):
        return check_extent(axis, label)
    dims = dims_of(variable)
    if axis not in dims:
        raise ValueError(
            f"{label}: expected a number, or a dimension of {variable}: {dims}, got {axis!r}"
        )
    return dims.index(axis)


class Input(NamedTuple):
    """An input of a function.

    Attributes
    ----------
    axis : int or None
        The axis along which the value is split over the ranks; None if every rank gets all of it.
    fixed : dict
        The extents that the type requires, by axis.
    value : array-like or None
        The value to use if a call gives none.
    downcast : bool
        Whether a value may be cast with a loss.
    """

    variable: Variable
    name: str | None
    type: TensorType
    axis: int | None
    fixed: dict[int, int]
    value: Any = None
    downcast: bool = False

    @property
    def label(self) -> str:
        return f"input {self.name!r}" if self.name else f"input {self.variable}"


class Output(NamedTuple):
    """An output of a function.

    Attributes
    ----------
    op : str or None
        How the values of the ranks are combined.
    over_cpu : bool
        Whether they are combined on the CPU.
    axis : int
        The axis along which they are gathered.
    stated : bool
        Whether the script has stated the operation.
    """

    variable: Variable
    dtype: Any
    op: str | None
    over_cpu: bool
    axis: int
    stated: bool


def parse_inputs(engine: Engine, inputs: Any, bcast_inputs: Any, downcast: bool = False) -> list[Input]:
    """Return a list of `Input`, with `bcast_inputs` last."""
    parsed = []
    for what, variables in (("inputs", inputs), ("bcast_inputs", bcast_inputs)):
        for variable in check_list(variables, what, "variables"):
            spec = _parse_input(engine, what, variable)
            parsed.append(spec._replace(downcast=spec.downcast or downcast))
    seen = [spec.variable for spec in parsed]
    for position, variable in enumerate(seen):
        if variable in seen[:position]:
            raise ValueError(f"inputs: {variable} is given more than once")
    return parsed


def _parse_input(engine: Engine, what: str, given: Any) -> Input:
    try:
        wrapped = given if type(given) is In else engine.unwrap_input(given)
        variable = given if wrapped is None else wrapped.variable
        kind = engine.input_type_of(variable)
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from error
    if engine.is_shared(variable):
        raise TypeError(f"{what}: {variable} is a shared variable, found in the graph; leave it out")
    fixed = {axis: extent for axis, extent in enumerate(kind.extents) if extent is not None}
    axis = getattr(wrapped, "axis", 0)
    if what == "bcast_inputs" and axis:
        raise ValueError(f"bcast_inputs: {variable} is not split, so it has no axis; got axis={axis}")
    if what == "bcast_inputs" or kind.ndim == 0:
        axis = None
    elif axis >= kind.ndim or axis in fixed:
        raise ValueError(
            f"inputs: {variable} ({kind.ndim} dimensions) cannot be split along axis {axis}; give it "
            f"in bcast_inputs"
        )
    elif axis and kind.format != "dense":
        raise ValueError(f"inputs: {variable} is sparse and can be split along axis 0 only, got {axis}")
    spec = Input(variable, variable.name, kind, axis, fixed)
    if wrapped is None:
        return spec
    downcast = bool(getattr(wrapped, "allow_downcast", False))
    return spec._replace(name=wrapped.name or variable.name, value=wrapped.value, downcast=downcast)


def parse_outputs(engine: Engine, outputs: Any) -> tuple[list[Output], list[str] | bool]:
    """Return ``(parsed, form)``.

    It has the form of the result of a call: the keys of a dictionary, in the order of the outputs,
    else whether it is a list.
    """
    if isinstance(outputs, Mapping):
        keys = sorted(outputs)
        if not all([isinstance(key, str) for key in keys]):
            raise TypeError(f"outputs: expected strings as the keys of a dict, got {keys}")
        return [_parse_output(engine, f"outputs[{key!r}]", outputs[key]) for key in keys], keys
    if outputs is None:
        outputs = []
    listed = isinstance(outputs, list)
    each = outputs if listed else [outputs]
    return [_parse_output(engine, f"outputs[{i}]", output) for i, output in enumerate(each)], listed


def _parse_output(engine: Engine, where: str, output: Any) -> Output:
    mode: str | None
    variable, mode, axis = output, "avg", 0
    if isinstance(output, tuple):
        if len(output) != 2:
            raise ValueError(
                f"{where}: expected (variable, op), got {len(output)} items; give several outputs as a "
                f"list"
            )
        variable, mode = output
        if hasattr(mode, "type"):
            raise TypeError(
                f"{where}: expected (variable, op), got a variable, {mode}, as op; give several "
                f"outputs as a list"
            )
    elif type(output) is Out:
        variable, mode, axis = output.variable, output.op, output.axis
    variable = engine.unwrap_output(variable)
    try:
        kind = engine.type_of(variable)
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from error
    op, over_cpu = parse_output_mode(mode)
    stated = isinstance(output, (tuple, Out))
    if not stated and not OPERATIONS["avg"].is_defined_for(kind.dtype):
        raise TypeError(
            f"{where} ({variable}): outputs are averaged by default ('avg'), which is not defined "
            f"for dtype {kind.dtype}; if it has an item for each row, give it as (output, 'gather'); "
            f"otherwise give another operation, or cast it to a float"
        )
    if op in OPERATIONS:
        OPERATIONS[op].check_dtype(kind.dtype, f"{where} ({variable})")
    if axis and (op != GATHER or axis >= kind.ndim):
        raise ValueError(
            f"{where}: axis={axis} is for an output that is gathered and has this axis, got op "
            f"{mode!r} and {kind.ndim} dimensions"
        )
    return Output(variable, kind.dtype, op, over_cpu, axis, stated)


def parse_updates(
    engine: Engine, updates: Any
) -> tuple[list[tuple[SharedVariable, Any]], list[str | None]]:
    """Return ``(pairs, ops)``: the updates ``(shared, new)``, and the operation over slices of each."""
    if updates is None:
        updates = []
    if isinstance(updates, Mapping):
        updates = list(updates.items())
    if not isinstance(updates, (list, tuple)):
        got = shortened(updates)
        raise TypeError(f"updates: expected a list of pairs or an ordered dict, got {got}")
    pairs: list[tuple[SharedVariable, Any]] = []
    ops: list[str | None] = []
    for position, update in enumerate(updates):
        if not isinstance(update, (tuple, list)) or len(update) not in (2, 3):
            raise TypeError(
                f"updates[{position}]: expected (shared, new) or (shared, new, op), got "
                f"{shortened(update)}"
            )
        shared, new, op = (*update, "avg") if len(update) == 2 else update
        if not engine.is_shared(shared):
            raise TypeError(f"updates[{position}]: expected a shared variable, got {shortened(shared)}")
        if op == GATHER:
            raise ValueError(f"updates[{position}]: 'gather' cannot accumulate an update")
        if op is not None:
            find_operation(op, f"updates[{position}]: op")
        if not hasattr(new, "type"):
            as_array(new, None, f"updates[{position}]: the new value of {shared}")
        if shared in [earlier for earlier, _ in pairs]:
            raise ValueError(f"updates[{position}]: {shared} is updated more than once")
        pairs.append((shared, new))
        ops.append(op)
    return pairs, ops


def parse_sliceable(
    engine: Engine, sliceable_shareds: Any, updates: list[tuple[SharedVariable, Any]]
) -> list[SharedVariable]:
    """Return the list of sliceable shared variables."""
    sliceable: list[SharedVariable] = check_list(
        sliceable_shareds, "sliceable_shareds", "shared variables"
    )
    for position, shared in enumerate(sliceable):
        if not engine.is_shared(shared) or not engine.is_tensor(shared):
            raise TypeError(
                f"sliceable_shareds[{position}]: expected a shared variable, got {shortened(shared)}"
            )
        kind = engine.type_of(shared)
        if kind.ndim == 0 or kind.extents[0] is not None:
            raise ValueError(f"sliceable_shareds[{position}]: {shared} cannot be sliced on axis 0")
        if shared in sliceable[:position]:
            raise ValueError(f"sliceable_shareds: {shared} is given more than once")
        if shared in [target for target, _ in updates]:
            raise ValueError(
                f"sliceable_shareds: {shared} is updated by this function, which reads only some of its "
                f"rows; leave it out of one of the two"
            )
    return sliceable


# The table of a function in notebooks


def describe(function: Any) -> list[tuple[str, str, str, str]]:
    """Return a row for each input, output, update and sliceable shared variable.

    Each row has the kind, the name or number, the type, and how the ranks share it.
    """
    if function._world is None:
        return [("a copy", "", "", "cannot be called")]
    replica, shareds = function.replica, function._world.rank_state.shareds
    rows = []
    for item in function.inputs:
        how = "whole on every rank" if item.axis is None else f"split along axis {item.axis}"
        rows.append(("input", item.name or str(item.variable), _type(item.type), how))
    keys = function.form if isinstance(function.form, list) else range(len(replica.output_modes))
    for key, dtype, mode, axis in zip(
        keys, replica.output_dtypes, replica.output_modes, replica.output_axes
    ):
        rows.append(("output", str(key), str(dtype), _combination(mode, axis)))
    for number, op in replica.updates:
        how = "not over slices" if op is None else f"{op} over slices"
        rows.append(("update", name_of(shareds[number]), "", f"on each rank, {how}"))
    for number in replica.sliceable:
        rows.append(("sliceable", name_of(shareds[number]), "", "each rank's own rows"))
    return rows


def _type(kind: TensorType) -> str:
    if kind.format == "object":
        return "object"
    text = f"{kind.dtype}, {kind.ndim} dimension" + "s" * (kind.ndim != 1)
    return text if kind.format == "dense" else f"{kind.format}, {text}"


def _combination(mode: str | None, axis: int) -> str:
    if mode is None:
        return "the master's own"
    return f"{GATHER} along axis {axis}" if mode == GATHER else f"{mode} over the ranks"
