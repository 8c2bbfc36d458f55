"""The arguments of `function()`: checked, and converted to one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from synkhronos._typing import SharedVariable, Variable
from synkhronos.arithmetic.conversion import as_array
from synkhronos.arithmetic.operations import GATHER, OPERATIONS, find_operation, parse_output_mode
from synkhronos.engines.base import Engine, TensorType


class Input(NamedTuple):
    """An input of a function."""

    variable: Variable
    name: str | None
    type: TensorType
    scattered: bool
    ones: tuple[int, ...]  # axes that the type requires to have extent 1

    @property
    def label(self) -> str:
        return f"input {self.name!r}" if self.name else f"input {self.variable}"


def parse_inputs(engine: Engine, inputs: Any, bcast_inputs: Any) -> list[Input]:
    """Return a list of `Input`, the scattered ones first."""
    parsed = []
    for what, variables, scattered in (("inputs", inputs, True), ("bcast_inputs", bcast_inputs, 0)):
        if variables is None:
            variables = []
        if not isinstance(variables, (list, tuple)):
            raise TypeError(f"{what}: expected a list of variables, got {variables!r}")
        for variable in variables:
            parsed.append(_parse_input(engine, what, variable, bool(scattered)))
    seen = [one.variable for one in parsed]
    for position, variable in enumerate(seen):
        if variable in seen[:position]:
            raise ValueError(f"inputs: {variable} is given more than once")
    return parsed


def _parse_input(engine, what, variable, scattered):
    try:
        kind = engine.type_of(variable)
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from error
    if engine.is_shared(variable):
        raise TypeError(f"{what}: {variable} is a shared variable, found in the graph; leave it out")
    if scattered and (kind.ndim == 0 or kind.broadcastable[0]):
        raise ValueError(
            f"inputs: {variable} ({kind.ndim} dimensions) cannot be split along axis 0; give it "
            f"in bcast_inputs"
        )
    ones = tuple(axis for axis, is_one in enumerate(kind.broadcastable) if is_one)
    return Input(variable, variable.name, kind, scattered, ones)


def parse_outputs(
    engine: Engine, outputs: Any
) -> tuple[list[Variable], list[str | None], bool]:
    """Return ``(variables, modes, single)``, where `single` means one output instead of a list."""
    single = outputs is not None and not isinstance(outputs, list)
    if outputs is None:
        outputs = []
    elif single:
        outputs = [outputs]
    variables: list[Variable] = []
    modes: list[str | None] = []
    for position, output in enumerate(outputs):
        variable, mode = output, "avg"
        if isinstance(output, tuple):
            if len(output) != 2:
                raise ValueError(
                    f"outputs[{position}]: expected (variable, op), got {len(output)} items; give "
                    f"several outputs as a list"
                )
            variable, mode = output
            if hasattr(mode, "type"):
                raise TypeError(
                    f"outputs[{position}]: expected (variable, op), got a variable, {mode}, as op; "
                    f"give several outputs as a list"
                )
        try:
            kind = engine.type_of(variable)
        except TypeError as error:
            raise TypeError(f"outputs[{position}]: {error}") from error
        name, _ = parse_output_mode(mode)
        if name in OPERATIONS:
            OPERATIONS[name].check_dtype(kind.dtype, f"output {position} ({variable})")
        variables.append(variable)
        modes.append(mode)
    return variables, modes, single


def parse_updates(
    engine: Engine, updates: Any
) -> tuple[list[tuple[SharedVariable, Any]], list[str | None]]:
    """Return ``(pairs, ops)``: the updates ``(shared, new)``, and the operation over slices of each."""
    if updates is None:
        updates = []
    if isinstance(updates, Mapping):
        updates = list(updates.items())
    if not isinstance(updates, (list, tuple)):
        raise TypeError(f"updates: expected a list of pairs or an ordered dict, got {updates!r}")
    pairs: list[tuple[SharedVariable, Any]] = []
    ops: list[str | None] = []
    for position, update in enumerate(updates):
        if not isinstance(update, (tuple, list)) or len(update) not in (2, 3):
            raise TypeError(
                f"updates[{position}]: expected (shared, new) or (shared, new, op), got {update!r}"
            )
        shared, new, op = (*update, "avg") if len(update) == 2 else update
        if not engine.is_shared(shared):
            raise TypeError(f"updates[{position}]: expected a shared variable, got {shared!r}")
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


def parse_givens(givens: Any) -> list[tuple[Variable, Any]]:
    """Return a list of pairs of a variable and its replacement."""
    pairs = givens.items() if isinstance(givens, Mapping) else givens or []
    if isinstance(pairs, (int, float, str, bytes)) or hasattr(pairs, "type"):
        raise TypeError(f"givens: expected a list of pairs or a dict, got {givens!r}")
    pairs = list(pairs)
    for position, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"givens[{position}]: expected (variable, value), got {pair!r}")
    return pairs


def parse_sliceable(
    engine: Engine, sliceable_shareds: Any, updates: list[tuple[SharedVariable, Any]]
) -> list[SharedVariable]:
    """Return the list of sliceable shared variables."""
    if sliceable_shareds is None:
        return []
    if not isinstance(sliceable_shareds, (list, tuple)):
        raise TypeError(
            f"sliceable_shareds: expected a list of shared variables, got {sliceable_shareds!r}"
        )
    for position, shared in enumerate(sliceable_shareds):
        if not engine.is_shared(shared) or not engine.is_tensor(shared):
            raise TypeError(
                f"sliceable_shareds[{position}]: expected a shared variable, got {shared!r}"
            )
        kind = engine.type_of(shared)
        if kind.ndim == 0 or kind.broadcastable[0]:
            raise ValueError(f"sliceable_shareds[{position}]: {shared} cannot be sliced on axis 0")
        if shared in sliceable_shareds[:position]:
            raise ValueError(f"sliceable_shareds: {shared} is given more than once")
        if shared in [target for target, _ in updates]:
            raise ValueError(
                f"sliceable_shareds: {shared} is updated by this function, which reads only some of its "
                f"rows; leave it out of one of the two"
            )
    return list(sliceable_shareds)
