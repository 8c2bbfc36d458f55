"""The rows that an index selects in givens: divided when a function is built, counted in a call."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from synkhronos._errors import warn
from synkhronos._typing import Compiled, SharedVariable, Variable
from synkhronos.engines.analysis.windows import how_to_select
from synkhronos.engines.base import Engine, Windows, name_of
from synkhronos.functions.signature import Input, Output
from synkhronos.host import compiler
from synkhronos.world.world import World

#: The operations that return the value that every rank has.
_OF_EQUAL_VALUES = ("avg", "min", "max", None)


class Window(NamedTuple):
    """The number of rows that an index selects.

    Attributes
    ----------
    lengths : compiled function
        Computes the numbers of rows in the new value of each variable, which must be equal.
    arguments : list of int
        The positions of its arguments among the arguments of the function: the arguments that are whole.
    names : list of str
        The variables that the rows replace.
    split : list of str
        The inputs that are split.
    """

    lengths: Compiled
    arguments: list[int]
    names: list[str]
    split: list[str]

    def length(self, engine: Engine, arguments: Sequence[Any], n_rows: int | None = None) -> int:
        """Return the number of rows; raise if it differs, also from the number of rows of the inputs."""
        chosen = [arguments[position] for position in self.arguments]
        lengths = [int(item) for item in engine.call(self.lengths, chosen)]
        if len(set(lengths)) > 1:
            listed = ", ".join(f"{name}: {length}" for name, length in zip(self.names, lengths))
            raise ValueError(
                f"givens: expected slices of the same number of rows, got {listed}; each rank has the "
                f"same rows of all of them"
            )
        if n_rows not in (None, lengths[0]):
            raise ValueError(
                f"givens: expected as many rows as of {', '.join(self.split)}, {n_rows} rows, got "
                f"{lengths[0]} rows that replace {', '.join(self.names)}; each rank has the same rows "
                f"of all of them. Give an input that has no such rows, or an index that selects none, "
                f"in bcast_inputs"
            )
        return lengths[0]


def divide(
    world: World,
    inputs: Sequence[Input],
    n_own: int,
    givens: Sequence[tuple[Variable, Any]],
    sliceable: Sequence[Variable],
    outputs: Sequence[Output],
    updates: Sequence[tuple[SharedVariable, Any]],
) -> tuple[Windows, Window | None]:
    """Have each rank use its part of the rows that an index selects in givens.

    Parameters
    ----------
    inputs : list of Input
        Of the first `n_own` inputs, the inputs that are not split may select rows. Every rank uses all
        of the others.
    givens : list of pairs
        The variables and what replaces them.
    sliceable : list of shared variables
        The shared variables whose rows are divided.
    outputs : list of Output
        The outputs of the function.
    updates : list of pairs
        Its updates.

    Raises
    ------
    ValueError
        If an index selects rows in a way in which they cannot be divided, or nothing is divided and so
        an output would differ from the serial one.

    Warns
    -----
    SynkhronosWarning
        If nothing is divided although an index selects something.
    """
    engine, index = world.rank_state.engine, [item for item in inputs[:n_own] if item.axis is None]
    if not givens or not index:
        return Windows(givens, [], [], {}, []), None
    split = [variable for variable in inputs if variable.axis is not None]
    rows = {spec.variable: spec.axis for spec in inputs if spec.axis is not None}
    divided = {**rows, **dict.fromkeys(sliceable, 0)}
    windows = engine.cut_windows(givens, [spec.variable for spec in index], divided)
    if not windows.bounds:
        if windows.whole and not divided:
            news = [new for _, new in updates]
            _check_nothing_is_wrong(world, windows.whole, index, outputs, news)
        return windows, None
    positions = [position for position, variable in enumerate(inputs) if variable.axis is None]
    variables = [inputs[position].variable for position in positions]
    on_host = [True] * len(windows.lengths)
    lengths = engine.build(variables, windows.lengths, [], [], [], on_host, on_unused_input="ignore")
    names = [name_of(item) for item in windows.divided]
    return windows, Window(lengths, positions, names, [item.label for item in split])


def _check_nothing_is_wrong(
    world: World,
    whole: Sequence[Variable],
    index: Sequence[Input],
    outputs: Sequence[Output],
    news: Sequence[Any],
) -> None:
    """Say that nothing is divided although `whole` depend on an index; raise if that is wrong."""
    results = [*(spec.variable for spec in outputs), *news]
    are_used = world.rank_state.engine.are_computed_from(results, whole)
    if not any(are_used):
        return
    replaced = ", ".join(map(name_of, whole))
    selecting = ", ".join([name_of(spec.variable) for spec in index])
    text = (
        f"nothing is divided among the ranks, so each of them computes the same: what replaces "
        f"{replaced} in givens depends on {selecting}, but has no rows that it selects"
    )
    remedy = how_to_select(replaced, selecting)
    for position, (node, is_used) in enumerate(zip(outputs, are_used)):
        if is_used and node.op not in _OF_EQUAL_VALUES:
            raise ValueError(
                f"outputs[{position}]: {node.op!r} over the ranks would differ from "
                f"{compiler.NAME}.function(), as {text}. {remedy}"
            )
    if world.size > 1:
        warn(f"function: {text}, which is right, but takes as long as on one process. {remedy}")
