"""Descriptions of a function's inputs, outputs and updates, for its table in notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from synkhronos.arithmetic.operations import GATHER

if TYPE_CHECKING:
    from synkhronos._typing import SharedVariable
    from synkhronos.engines.base import InputType
    from synkhronos.functions.signature import Input


def describe(function: Any) -> list[tuple[str, str, str, str]]:
    """Return a row for each input, output, update and sliceable shared variable.

    Each row has the kind, the name or number, the type, and how the ranks share it.
    """
    if function._world is None:
        return [("a copy", "", "", "cannot be called")]
    replica, shareds = function.replica, function._world.rank_state.shareds
    rows = []
    for item in function.inputs:
        rows.append(("input", item.name or str(item.variable), _type(item.type), _split(item)))
    keys = function.form if isinstance(function.form, list) else range(len(replica.output_modes))
    for key, dtype, mode, axis in zip(
        keys, replica.output_dtypes, replica.output_modes, replica.output_axes
    ):
        rows.append(("output", str(key), str(dtype), _combination(mode, axis)))
    for number, op in replica.updates:
        how = "not over slices" if op is None else f"{op} over slices"
        rows.append(("update", _name(shareds[number]), "", f"on each rank, {how}"))
    for number in replica.sliceable:
        rows.append(("sliceable", _name(shareds[number]), "", "each rank's own rows"))
    return rows


def _type(kind: InputType) -> str:
    if kind.format == "object":
        return "object"
    text = f"{kind.dtype}, {kind.ndim} dimension" + "s" * (kind.ndim != 1)
    return text if kind.format == "dense" else f"{kind.format}, {text}"


def _split(spec: Input) -> str:
    return "whole on every rank" if spec.axis is None else f"split along axis {spec.axis}"


def _combination(mode: str | None, axis: int) -> str:
    if mode is None:
        return "the master's own"
    return f"{GATHER} along axis {axis}" if mode == GATHER else f"{mode} over the ranks"


def _name(shared: SharedVariable) -> str:
    return shared.name or str(shared)
