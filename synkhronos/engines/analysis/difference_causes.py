"""Why the value of all rows differs from the value that the values of parts of the rows give.

Parts are combined by a weighted average or a sum, which is right for whatever is linear in means or sums
over the rows. So the search follows these *mixed* values, and finds where they are used otherwise.
"""

from __future__ import annotations

from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

from synkhronos.engines import names
from synkhronos.engines.analysis.graphs import operands, steps_in
from synkhronos.engines.analysis.rows import FIXED, LENGTH, RowGraph
from synkhronos.engines.analysis.rules import Powers, Rule, Terms, rule_of
from synkhronos.engines.analysis.shapes import constant_index, item
from synkhronos.engines.base import BOUND, Causes
from synkhronos.engines.collectives import Collective
from synkhronos.engines.names import Apply, Variable, io_toposort, scalar

CONSTANT, QUOTIENT, STATISTICS, NONLINEAR = "constant", "quotient", "statistics", "nonlinear"
ACROSS, SPACED, CLIPPED = "across", "spaced", "clipped"
RECURRENT, FIXED_BATCH = "recurrent", "fixed batch"
#: The possible causes, as names, and what to do
EXPLANATIONS = {
    CONSTANT: "a sum over the rows that is divided by a constant, such as a batch size: divide it by "
    "the number of rows, x.shape[0], or take the mean",
    QUOTIENT: "a quotient of two sums over the rows, such as a mean of what a mask selects: return both "
    "sums and divide them, or combine each in the graph with synk.ops.all_reduce(total, 'sum')",
    STATISTICS: "statistics over the batch, as in batch normalization, which each rank computes of its "
    "own rows: combine them in the graph, see synkhronos.extensions.batch_norm",
    NONLINEAR: "a nonlinear function of a value of all rows, such as the root of a mean: combine the "
    "value in the graph first, with synk.ops.all_reduce, or compute the function after the call",
    ACROSS: "a value that depends on several rows, or on the places of rows, such as the largest of "
    "the rows, a part of them, their order, or all pairs of them: combine the rows in the graph first, "
    "with synk.ops.all_gather, or gather them and compute it after the call",
    SPACED: "rows at equal distances, such as x[::2], counted from the first row of each rank: give a "
    "number of rows for which the share of each rank is a multiple of the distance",
    CLIPPED: "bounds for values inside the gradient (grad_clip), which are as large for a mean over the "
    "rows of a rank: bound the gradient after it was averaged, or give loss_op='sum'",
    RECURRENT: "a loop along the axis that is divided among the ranks, such as theano.reduce, which "
    "begins anew on each: if the rows are on another axis, say so with synk.In(x, axis=1)",
    FIXED_BATCH: "a batch size that is fixed in the graph, such as that of input_shape or reshape: use "
    "None, -1 or x.shape[0] for it",
}

#: How a value depends on the contents of the rows: not at all, on all of them together, or row by row.
_NONE, _MIXED, _ROWS = range(3)

_TESTS = (scalar.IsNan, scalar.IsInf)  # of results that are wrong anyway
_CLIPPING = ("GradClip", "_ClipGradient")
_SELECTING = ("AdvancedSubtensor", "AdvancedBooleanSubtensor")  # with a mask
_NORMALIZING = ("AbstractBatchNormTrain",)
_REDUCTIONS = (names.CAReduce, *names.LARGEST)
_WINDOWS = (*names.ANY_CONVOLUTIONS, *names.ANY_POOLS)
#: Operations after which rows may have other places, and still all be there
_MOVING = (names.Join, names.AdvancedSubtensor1, names.AdvancedSubtensor, *names.WRITES)
#: Functions without a rule that are not linear in their first operand, a matrix
_OF_MATRICES = ("MatrixInverse", "MatrixPinv", "Det", "Cholesky", "Eigh", "Solve", "SVD", "SLogDet")
#: The first of the operands that determine only how many items there are, or where
_EXTENTS = (
    (names.ARange, 0), (names.AllocEmpty, 0), (names.Alloc, 1), (names.Subtensor, 1), (names.Reshape, 1),
)  # fmt: skip


def difference_causes(
    inputs: Sequence[Variable], axes: Sequence[int | str | None], results: Sequence[Variable]
) -> list[Causes]:
    """Return the `Causes` for which each result may differ, as names in `EXPLANATIONS`.

    Parameters
    ----------
    inputs : list of variables
    axes : list of int, None or `BOUND`
        The axis of each input along which its rows are split.
    results : list of variables
    """
    search = _Search(dict(zip(inputs, axes)), io_toposort(inputs, results))
    return [search.state(result).causes for result in results]


def statistics_in(
    inputs: Sequence[Variable], axes: Sequence[int | str | None], results: Sequence[Variable]
) -> list[Variable]:
    """Return the values of all rows in which results are not linear, each after those in it."""
    return list(_Search(dict(zip(inputs, axes)), io_toposort(inputs, results)).statistics)


def _bounded_by_largest(nodes: Iterable[Apply]) -> Iterator[Variable]:
    """Yield values whose largest item is subtracted from them, as in exp(x - max(x))."""
    for node in nodes:
        if isinstance(getattr(node.op, "scalar_op", None), scalar.Sub):
            other = node.inputs[1]
            while other.owner is not None and isinstance(other.owner.op, names.DimShuffle):
                other = other.owner.inputs[0]
            rule = rule_of(other.owner) if operands(other)[:1] == node.inputs[:1] else None
            if rule is not None and isinstance(other.owner.op, _REDUCTIONS) and not rule.reduced:
                yield node.inputs[0]


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
    pairs : tuple of int
        The axes with rows of a value of pairs of rows, such as differences of all pairs.
    is_drawn : bool
        Whether the rows are random numbers only.
    """

    kind: int = _NONE
    is_shifted: bool = False
    is_certain: bool = True
    is_selected: bool = False
    causes: Causes = Causes()
    mixed: frozenset[Variable] = frozenset()
    pairs: tuple[int, ...] = ()
    is_drawn: bool = False

    @property
    def mixes(self) -> bool:
        return self.kind == _MIXED or self.is_shifted


_UNRELATED = _State()


def _joined(first: _State, second: _State) -> _State:
    causes = Causes(*(a | b for a, b in zip(first.causes, second.causes)))
    return max(first, second, key=lambda state: state.kind)._replace(
        is_shifted=first.is_shifted or second.is_shifted, causes=causes, mixed=first.mixed | second.mixed
    )


class _Search:
    def __init__(self, axes: Mapping[Variable, int | str | None], nodes: Sequence[Apply]) -> None:
        self._graph = RowGraph(axes)
        self.statistics: dict[Variable, None] = {}
        self._bounded = set(_bounded_by_largest(nodes))
        self._states = {
            variable: _State(_ROWS) for variable, axis in axes.items() if axis not in (None, BOUND)
        }
        for node in nodes:
            self._visit(node)

    def state(self, variable: Variable) -> _State:
        return self._states.get(variable, _UNRELATED)

    def _visit(self, node: Apply) -> None:
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
        steps, inner = steps_in(loop), _Search({}, [])
        inner._graph = graph
        states = {variable: self.state(source) for variable, source in steps.sources}
        for _ in range(2):  # a step gets the states of the step before it
            inner._states = dict(states)
            for node in io_toposort(steps.inputs, steps.outputs):
                inner._visit(node)
            states.update(
                (later, _joined(states[later], inner.state(item))) for item, later in steps.states
            )
        for output, end in steps.ends:
            state = inner.state(output)
            mixed = frozenset([end] if state.kind == _MIXED else [])
            self._states[end] = state._replace(mixed=mixed)
        return True

    def _state(self, node: Apply, states: list[_State]) -> _State:
        op, operation, rule = node.op, getattr(node.op, "scalar_op", None), rule_of(node)
        if all(state == _UNRELATED for state in states):
            return self._without_causes(node, rule, states)
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
        states = _without_extents(op, states)
        found = dict(self._causes(node, rule, states))
        is_across, pairs = self._across(node, rule, states)
        if is_across:
            found[ACROSS] = True
        possible = frozenset(found).union(*[state.causes.possible for state in states])
        certain = frozenset(item for item in found if found[item])
        certain = certain.union(*[state.causes.certain for state in states])
        made = self._without_causes(node, rule, states)
        mixed = frozenset(item for each in states if made.is_shifted for item in each.mixed)
        return made._replace(causes=Causes(possible, certain), mixed=mixed, pairs=pairs)

    def _across(
        self, node: Apply, rule: Rule | None, states: list[_State]
    ) -> tuple[bool, tuple[int, ...]]:
        """Return whether rows are combined otherwise than by a sum, and the axes of pairs of rows."""
        op = node.op
        if rule is None or isinstance(op, _MOVING):
            return self._is_rearranged(node, states), ()
        single: set[Any] = set()
        paired: set[Any] = set()
        for labels, variable, state in zip(rule.inputs, node.inputs, states):
            value = self._graph.value(variable)
            if labels is not None and state.kind == _ROWS and not state.is_drawn:
                paired.update(labels[axis] for axis in state.pairs)
                if value is not None and value.axis is not None:
                    single.add(labels[value.axis])
        kept = [label for labels in rule.outputs for label in labels]
        used = (single | paired) - {None}
        for labels, state in zip(rule.inputs, states):
            if state.kind == _NONE and len(used.intersection(labels or ())) > 1:
                used = set()  # this may select pairs of a row and itself
        if len(used) > 1:
            are_combined = any(label not in kept or label in rule.mixed for label in used)
            return are_combined, () if are_combined else tuple(kept.index(label) for label in used)
        if node.inputs[0] in self._bounded:
            return False, ()
        if single == {None}:
            return isinstance(op, _WINDOWS), ()
        is_lost = rule.reduced is None and not single.issubset(kept)
        if is_lost and isinstance(op, names.Subtensor):
            return self._is_part(self._row_index(node)), ()
        return is_lost or not single.isdisjoint(rule.mixed), ()

    def _is_rearranged(self, node: Apply, states: list[_State]) -> bool:
        """Whether an operation takes rows by given numbers."""
        value = self._graph.value(node.inputs[0]) if states and states[0].kind == _ROWS else None
        if value is None or value.axis != 0 or states[0].is_drawn:
            return False
        is_looked_up = isinstance(node.op, names.AdvancedSubtensor1) and states[1].kind == _NONE
        return is_looked_up and not self._graph.counts_rows(node.inputs[1])

    def _is_part(self, index: Any) -> bool:
        """Whether an index along the axis of the rows selects a part of them, or reverses them.

        What the script chooses by an input is chosen of the rows of each rank. All rows may equal a
        single one, such as the first, and shares may be multiples of a step.
        """
        if isinstance(index, int) or _is_spaced(index):
            return False
        bounds = [index.start, index.stop, index.step] if isinstance(index, slice) else [index]
        numbers = [
            self._graph.number(item(bound)) or "unknown" if isinstance(bound, Variable) else bound
            for bound in bounds
        ]
        wholes = [(None, 0), (None, LENGTH), (None, 1)]
        is_whole = len(numbers) == 3 and all(number in whole for number, whole in zip(numbers, wholes))
        return not is_whole and FIXED not in numbers

    def _without_causes(self, node: Apply, rule: Rule | None, states: list[_State]) -> _State:
        op, value = node.op, self._graph.value(node.outputs[0])
        kind = max((state.kind for state in states), default=_NONE)
        has_axis = value is not None and value.axis is not None
        if kind == _NONE:  # an index in the bounds, or the size of a draw, may say that it has rows
            is_by_row = has_axis and isinstance(op, (names.Subtensor, *names.RANDOM))
            return _State(_ROWS if is_by_row else _NONE, is_drawn=isinstance(op, names.RANDOM))
        if isinstance(op, names.Subtensor) and not isinstance(self._row_index(node), slice):
            return _State()  # one row, of which nothing is known
        is_certain = rule is not None and all(item.is_certain for item in states if item.mixes)
        if kind == _ROWS and value is not None and value.axis is None:
            return _State(_MIXED, False, is_certain)
        if kind == _ROWS and rule is not None and isinstance(op, _REDUCTIONS) and not has_axis:
            [kept, *_] = rule.outputs
            if 0 not in kept:  # most values have their rows on axis 0
                return _State(_MIXED, False, is_certain and bool(rule.reduced) and not kept)
        # In PyTensor 3.3 the operation of one index is that of several.
        is_counted = isinstance(op, names.AdvancedIncSubtensor1) and len(node.inputs) == 3
        is_counted = is_counted and not op.set_instead_of_inc
        if is_counted and kind == _ROWS and states[0].kind == states[1].kind == _NONE and not has_axis:
            return _State(_MIXED)  # as by bincount
        is_shifted = kind == _ROWS and any(state.mixes for state in states)
        is_selected = _selects(node) or any(state.is_selected for state in states)
        is_drawn = kind == _ROWS and all(state.is_drawn for state in states if state.kind != _NONE)
        return _State(kind, is_shifted, is_certain, is_selected, is_drawn=is_drawn)

    def _row_index(self, node: Apply) -> Any:
        """Return the index along the axis of the rows."""
        rows, chosen = self._graph.value(node.inputs[0]), constant_index(node)
        if rows is None or rows.axis is None or rows.axis >= len(chosen):
            return slice(None)
        return chosen[rows.axis]

    def _causes(
        self, node: Apply, rule: Rule | None, states: list[_State]
    ) -> Iterator[tuple[str, bool]]:
        """Yield the causes that a node adds, and whether each is certain."""
        op, name = node.op, type(node.op).__name__
        has_rows = any(state.kind == _ROWS for state in states)
        if any(state.mixes for state in states):
            unknown = [(NONLINEAR, name in _OF_MATRICES and states[0].mixes and states[0].is_certain)]
            yield from unknown if rule is None else self._of_values(rule, states, node.outputs[0])
        if name in _CLIPPING and has_rows:
            yield CLIPPED, False
        index = self._row_index(node) if isinstance(op, names.Subtensor) else slice(None)
        if not isinstance(index, slice):
            yield ACROSS, False
        elif _is_spaced(index):
            yield SPACED, False
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


def _is_spaced(index: Any) -> bool:
    """Whether an index takes one of every few items, as in x[::2] and x[1::2]."""
    step = index.step if isinstance(index, slice) else None
    return (
        isinstance(step, int) and step > 1 and index.start in (None, *range(step)) and index.stop is None
    )


def _without_extents(op: Any, states: list[_State]) -> list[_State]:
    """Leave out what determines only the number of items, such as the length of the longest row."""
    first = next((first for kind, first in _EXTENTS if isinstance(op, kind)), len(states))
    return [
        _State() if place >= first and not (state.is_certain or state.is_selected) else state
        for place, state in enumerate(states)
    ]


def _selects(node: Apply) -> bool:
    """Whether an operation selects items by their contents, as with a mask."""
    name = type(node.op).__name__
    if name in _SELECTING:
        return any(getattr(variable.type, "dtype", None) == "bool" for variable in node.inputs[1:])
    return name == "Nonzero"
