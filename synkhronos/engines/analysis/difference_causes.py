"""Why the value of all rows differs from the value that the values of parts of the rows give.

Parts are combined by a weighted average or a sum, which is right for whatever is linear in means or sums
over the rows. So the search follows these *mixed* values, and finds where they are used otherwise.
"""

from __future__ import annotations

from typing import Iterator, Mapping, NamedTuple, Sequence

from synkhronos.engines import names
from synkhronos.engines.analysis.graphs import steps_in
from synkhronos.engines.analysis.rows import RowGraph
from synkhronos.engines.analysis.rules import Powers, Rule, Terms, rule_of
from synkhronos.engines.analysis.shapes import constant_index, normalized_axes
from synkhronos.engines.base import BOUND, Causes
from synkhronos.engines.collectives import Collective
from synkhronos.engines.names import Apply, Variable, io_toposort, scalar

#: The possible causes, as names
CONSTANT, QUOTIENT, STATISTICS, NONLINEAR, CLIPPED, RECURRENT, FIXED_BATCH = DIFFERENCE_CAUSES = (
    "constant", "quotient", "statistics", "nonlinear", "clipped", "recurrent", "fixed batch",
)  # fmt: skip

#: How a value depends on the contents of the rows: not at all, on all of them together, or row by row.
_NONE, _MIXED, _ROWS = range(3)

_TESTS = (scalar.IsNan, scalar.IsInf)  # of results that are wrong anyway
_CLIPPING = ("GradClip", "_ClipGradient")
_SELECTING = ("AdvancedSubtensor", "AdvancedBooleanSubtensor")  # with a mask
_NORMALIZING = ("AbstractBatchNormTrain",)


def difference_causes(
    inputs: Sequence[Variable], axes: Sequence[int | str | None], results: Sequence[Variable]
) -> list[Causes]:
    """Return the `Causes` for which each result may differ, as names in `DIFFERENCE_CAUSES`.

    Parameters
    ----------
    inputs : list of variables
    axes : list of int, None or `BOUND`
        The axis of each input along which its rows are split.
    results : list of variables
    """
    search = _Search(dict(zip(inputs, axes)))
    for node in io_toposort(inputs, results):
        search.visit(node)
    return [search.state(result).causes for result in results]


def statistics_in(
    inputs: Sequence[Variable], axes: Sequence[int | str | None], results: Sequence[Variable]
) -> list[Variable]:
    """Return the values of all rows in which results are not linear, each after those in it."""
    search = _Search(dict(zip(inputs, axes)))
    for node in io_toposort(inputs, results):
        search.visit(node)
    return list(search.statistics)


class _State(NamedTuple):
    """How a value depends on the contents of the rows.

    Attributes
    ----------
    kind : int
    is_shifted : bool
        Whether rows have a mixed value as a term.
    is_certain : bool
        Whether the mixed value is certainly a sum or a mean over the rows.
    is_selected : bool
        Whether the contents of the rows determine how many items it has.
    causes : Causes
        Of this value.
    mixed : frozenset of variables
        The mixed value itself, or those that rows have as terms.
    """

    kind: int = _NONE
    is_shifted: bool = False
    is_certain: bool = True
    is_selected: bool = False
    causes: Causes = Causes()
    mixed: frozenset[Variable] = frozenset()

    @property
    def mixes(self) -> bool:
        return self.kind == _MIXED or self.is_shifted


def _joined(one: _State, other: _State) -> _State:
    causes = Causes(*(a | b for a, b in zip(one.causes, other.causes)))
    return max(one, other, key=lambda state: state.kind)._replace(
        is_shifted=one.is_shifted or other.is_shifted, causes=causes, mixed=one.mixed | other.mixed
    )


class _Search:
    def __init__(self, axes: Mapping[Variable, int | str | None]) -> None:
        self._graph = RowGraph(axes)
        self.statistics: dict[Variable, None] = {}
        self._states = {
            variable: _State(_ROWS) for variable, axis in axes.items() if axis not in (None, BOUND)
        }

    def state(self, variable: Variable) -> _State:
        return self._states.get(variable, _State())

    def visit(self, node: Apply) -> None:
        """Find how the outputs of a node depend on the rows."""
        self._graph.add(node)
        if isinstance(node.op, names.Scan) and self._enter(node):
            return
        state = self._state(node, [self.state(variable) for variable in node.inputs])
        for output in node.outputs:
            self._states[output] = state
            if state.kind == _MIXED:
                self._states[output] = state._replace(mixed=frozenset([output]))

    def _enter(self, loop: Apply) -> bool:
        """Find how the outputs of a loop depend on the rows, unless its steps may be rows."""
        graph = self._graph.of_steps(loop)
        if graph is None:
            return False
        steps, inner = steps_in(loop), _Search({})
        inner._graph = graph
        states = {variable: self.state(source) for variable, source in zip(steps.inputs, steps.sources)}
        for _ in range(2):  # a step gets the states of the step before it
            inner._states = dict(states)
            for node in io_toposort(steps.inputs, steps.outputs):
                inner.visit(node)
            states.update(
                (later, _joined(states[later], inner.state(item))) for item, later in steps.states
            )
        for output, end in zip(steps.outputs, steps.ends):
            state = inner.state(output)
            if end is not None:
                self._states[end] = state._replace(
                    mixed=frozenset([end] if state.kind == _MIXED else [])
                )
        return True

    def _state(self, node: Apply, states: list[_State]) -> _State:
        op, operation = node.op, getattr(node.op, "scalar_op", None)
        if isinstance(op, (names.Shape, names.Shape_i)):
            is_count = states[0].is_selected and not getattr(op, "i", 0)
            return _State(_MIXED if is_count else _NONE, is_selected=is_count)
        if isinstance(op, names.Subtensor) and states[0].kind == _MIXED and states[0].is_selected:
            return states[0] if list(constant_index(node)) == [0] else _State()  # an item of a shape
        if isinstance(op, Collective) or isinstance(operation, _TESTS):
            return _State()
        if isinstance(operation, scalar.Second):
            return states[1]
        if isinstance(op, names.COPIES):
            states = states[:1]  # without conditions
        found = dict(self._causes(node, states))
        possible = frozenset(found).union(*[state.causes.possible for state in states])
        certain = frozenset(item for item in found if found[item])
        certain = certain.union(*[state.causes.certain for state in states])
        made = self._without_causes(node, states)
        mixed = frozenset(item for each in states if made.is_shifted for item in each.mixed)
        return made._replace(causes=Causes(possible, certain), mixed=mixed)

    def _without_causes(self, node: Apply, states: list[_State]) -> _State:
        op, value = node.op, self._graph.value(node.outputs[0])
        kind = max((state.kind for state in states), default=_NONE)
        has_axis = value is not None and value.axis is not None
        if kind == _NONE:  # an index in the bounds, or the size of a draw, may say that it has rows
            is_by_row = has_axis and isinstance(op, (names.Subtensor, *names.RANDOM))
            return _State(_ROWS if is_by_row else _NONE)
        if isinstance(op, names.Subtensor) and self._is_one_row(node):
            return _State()  # of which nothing is known
        is_certain = rule_of(node) is not None and all(item.is_certain for item in states if item.mixes)
        if kind == _ROWS and value is not None and value.axis is None:
            return _State(_MIXED, False, is_certain)
        if kind == _ROWS and isinstance(op, (names.CAReduce, *names.LARGEST)):
            axis = getattr(op, "axis", None)
            axes = normalized_axes(axis, node.inputs[0].ndim)
            if not has_axis and (0 in axes or axis is None):  # most values have their rows on axis 0
                is_of_all = _is_sum(op) and len(axes) == node.inputs[0].ndim
                return _State(_MIXED, False, is_certain and is_of_all)
        is_shifted = kind == _ROWS and any(state.mixes for state in states)
        return _State(
            kind, is_shifted, is_certain, _selects(node) or any(state.is_selected for state in states)
        )

    def _is_one_row(self, node: Apply) -> bool:
        """Whether a number is the index along the axis of the rows."""
        rows, chosen = self._graph.value(node.inputs[0]), constant_index(node)
        if rows is None or rows.axis is None or rows.axis >= len(chosen):
            return False
        return not isinstance(chosen[rows.axis], slice)

    def _causes(self, node: Apply, states: list[_State]) -> Iterator[tuple[str, bool]]:
        """Yield the causes that a node adds, and whether each is certain."""
        op, name, rule = node.op, type(node.op).__name__, rule_of(node)
        has_rows = any(state.kind == _ROWS for state in states)
        if any(state.mixes for state in states):
            unknown = [(NONLINEAR, False)]
            yield from unknown if rule is None else self._of_values(rule, states, node.outputs[0])
        if name in _CLIPPING and has_rows:
            yield CLIPPED, False
        if name in _NORMALIZING and has_rows:
            yield STATISTICS, True
        if isinstance(op, names.Scan) and has_rows and steps_in(node).states:
            yield RECURRENT, False
        is_fixed = rule is not None and any(
            place == 0 and isinstance(number, int) for place, number, _ in rule.numbers
        )
        if is_fixed and isinstance(op, (*names.CONVOLUTIONS, names.Reshape)) and states[0].kind == _ROWS:
            value = self._graph.value(node.inputs[0])
            if value is not None and value.axis == 0 and node.outputs[0].ndim > 1:
                yield FIXED_BATCH, False

    def _of_values(
        self, rule: Rule, states: list[_State], output: Variable
    ) -> Iterator[tuple[str, bool]]:
        """Yield the cause of the use of a mixed value, unless the result is linear in it."""
        values = rule.values
        used = [place for place, state in enumerate(states) if state.kind != _NONE]
        mixing = [place for place in used if states[place].mixes]
        has_rows = any(state.kind == _ROWS for state in states)
        cause = STATISTICS if has_rows else NONLINEAR
        if isinstance(values, Terms):
            if {*used} <= {*rule.operands(len(states))}:
                return
        elif isinstance(values, Powers):
            inexact = [place for place in mixing if values.exponents[place] != 1]
            if not inexact and len(used) == 1:
                known = self._graph.value(output)
                if len(states) > 1 and known is not None and known.degrees == {1}:
                    yield CONSTANT, False
                return
            mixing = inexact or mixing
            if inexact and -1 in values.exponents and not has_rows:
                cause = QUOTIENT
        for place in mixing:
            self.statistics.update(dict.fromkeys(sorted(states[place].mixed, key=str)))
        yield cause, any(states[place].is_certain for place in mixing)


def _selects(node: Apply) -> bool:
    """Whether an operation selects items by their contents, as with a mask."""
    name = type(node.op).__name__
    if name in _SELECTING:
        return any(getattr(variable.type, "dtype", None) == "bool" for variable in node.inputs[1:])
    return name == "Nonzero"


def _is_sum(op: names.Op) -> bool:
    return isinstance(getattr(op, "scalar_op", None), scalar.Add)
