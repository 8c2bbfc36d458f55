"""Properties of a function's graph: the variables that it uses, and its loops and gradients."""

from __future__ import annotations

from typing import Any, Collection, Sequence

from synkhronos._errors import warn
from synkhronos._typing import Compiled, SharedVariable, Variable
from synkhronos.engines.base import Analysis, Causes, Engine, name_of
from synkhronos.functions.replica_tracker import replica_tracker_of
from synkhronos.functions.signature import Input
from synkhronos.world.world import World


def analysis_of(world: World, function: Any) -> Analysis:
    """Return the `Analysis` of the graph of a function."""
    if function.analysis is None:
        replica = function.replica
        function.analysis = world.rank_state.engine.analyze(replica.compiled, replica.axes)
    return function.analysis


def causes_of(world: World, function: Any) -> tuple[list[Causes], dict[int, Causes]]:
    """Return why outputs, and the new values of variables by number, may differ from serial ones."""
    replica, numbers = function.replica, world.registry.numbers
    outputs, updates = world.rank_state.engine.difference_causes(replica.compiled, replica.axes)
    return outputs, {numbers[shared]: update for shared, update in updates.items()}


def uses(world: World, function: Any, analysis: Analysis) -> tuple[set[int], set[int]]:
    """Return two sets of numbers of variables: a narrow one and a wide one.

    The first has the variables on which outputs computed from rows depend, or new values of other
    variables, or of the same variable if it does more than accumulate; and the sliceable variables. The
    second has all variables for which a value that is set on the master only has an effect.
    """
    replica = function.replica
    is_divided = replica.has_rows
    numbers, streams = world.registry.numbers, replica_tracker_of(world).streams
    used = {world.rank_state.shareds[number] for number in replica.sliceable}
    read: set[SharedVariable] = set()
    for output, mode in zip(analysis.outputs, replica.output_modes):
        if is_divided:
            used |= output.own_shareds
        elif mode is not None:
            read |= output.own_shareds
    for shared, new in analysis.updates.items():
        if numbers[shared] in streams:
            continue
        read |= new.own_shareds
        if is_divided:
            used |= new.own_shareds - (analysis.accumulated & {shared})
    tensors = [variable for variable in used | read if world.rank_state.engine.is_tensor(variable)]
    return {numbers[tensor] for tensor in tensors if tensor in used} - streams, {
        numbers[tensor] for tensor in tensors
    } - streams


def sources(world: World, function: Any, analysis: Analysis) -> dict[int, tuple[bool, set[int]]]:
    """Return the sources of new values, by the number of the updated variable.

    The sources are whether a value depends on the rows of a rank, and the numbers of the shared
    variables on which it depends. Dependence through collectives does not count.
    """
    numbers, streams = world.registry.numbers, replica_tracker_of(world).streams
    return {
        numbers[shared]: (new.has_own_rows, {numbers[item] for item in new.own_shareds})
        for shared, new in analysis.updates.items()
        if numbers[shared] not in streams
    }


def check_loss_ops(world: World, function: Any) -> None:
    """Warn about gradients that pass collectives built for losses combined in another way."""
    replica = function.replica
    if world.size == 1 or not replica.has_collectives:
        return
    for index, loss_ops in enumerate(analysis_of(world, function).loss_ops):
        mode = replica.output_modes[index]
        if mode in ("avg", "sum") and loss_ops - {mode}:
            [other] = loss_ops - {mode}
            warn(
                f"{function!r}: output {index} is computed from a gradient that passes a collective "
                f"built with loss_op={other!r}, but its values are combined by {mode!r}: the gradient "
                f"differs from the one on one process. Build the collective with loss_op={mode!r}, or "
                f"give the output as (output, {other!r})"
            )


def check_recurrence(
    engine: Engine,
    compiled: Compiled,
    axes: Sequence[int | str | None],
    inputs: Sequence[Input],
    selected: Collection[Variable],
    sliceable: Sequence[SharedVariable],
) -> None:
    """Raise if a loop depends on earlier steps along an axis that is divided among the ranks.

    It would begin anew on every rank.

    Parameters
    ----------
    compiled : compiled function
        The function.
    axes : list of int, str or None
        As of its `Replica`.
    inputs : list of Input
        The inputs of the function.
    selected : list of variables
        The variables that are replaced by rows which an index selects.
    sliceable : list of shared variables
        Its sliceable shared variables.

    """
    found = engine.recurrent(compiled, axes)
    if not found:
        return
    position = found[0]
    if position < len(inputs):
        what, remedy = _of_input(inputs[position])
    elif selected and position < len(inputs) + 2:
        names = ", ".join(map(name_of, selected))
        what = f"givens: the value of {names}"
        remedy = "An index that selects steps of time, and no rows, is given in bcast_inputs"
    else:
        what = f"sliceable_shareds: {name_of(sliceable[position - len(inputs) - 2 * bool(selected)])}"
        remedy = "Leave it out, and give the rows as an input along their axis, as in synk.In(x, axis=1)"
    raise ValueError(
        f"{what} is divided among the ranks along an axis along which a scan computes each step from "
        f"earlier ones, so that it would begin anew on every rank. {remedy}"
    )


def _of_input(spec: Input) -> tuple[str, str]:
    name, other = name_of(spec.variable), 0 if spec.axis else 1
    remedy = "If every rank shall have all of it, give it in bcast_inputs"
    if spec.type.ndim > 1:
        remedy = (
            f"If axis {spec.axis} is time, and the rows are along axis {other}, give it as "
            f"synk.In({name}, axis={other}). {remedy}"
        )
    return f"inputs: {spec.label}", remedy


def collectives_in(
    engine: Engine, compiled: Compiled, axes: Sequence[int | str | None]
) -> dict[str, Any]:
    """Return the arguments of a `Replica` for collectives in the graph, and for joint updates.

    Joint updates do not use a rank's own rows: the new values depend on rows and random numbers only
    through collectives, or not at all.
    """
    if not engine.has_collectives(compiled):
        return {}
    streams = set(engine.random_streams(compiled))
    analysis = engine.analyze(compiled, axes)
    joint = [
        shared
        for shared, new in analysis.updates.items()
        if not new.has_own_rows and not new.own_shareds & streams
    ]
    return {
        "has_collectives": True,
        "uses_master": engine.uses_master(compiled),
        "joint": frozenset(joint),
    }
