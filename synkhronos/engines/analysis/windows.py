"""Rows of shared data that an index selects in givens: each rank computes on its part of them.

An *index* is an input of which every rank has the whole value, such as a scalar. It selects rows by a
slice whose bounds depend on it, or by row numbers that do. The values that are computed from the rows
are followed upwards in the graph, with the axis of the rows. A part of the rows is then taken at the
top, of the value on all of them, so it does not matter how a row depends on others; but the slice is
moved down past operations that compute item by item, and into row numbers, so that as few rows as
possible are computed or copied.
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

from synkhronos import _text
from synkhronos.engines import names
from synkhronos.engines.analysis.rows import FIXED, RowAxes, Rows, of_unlisted
from synkhronos.engines.analysis.rules import Part, rule_of
from synkhronos.engines.analysis.shapes import axis_after, numbers_along
from synkhronos.engines.base import Windows, name_of
from synkhronos.engines.names import Apply, Variable, get_idx_list, scalar, tensor

_LOOKUPS = (names.AdvancedSubtensor1, names.AdvancedSubtensor)
#: Operations of which a part of the output is computed from parts of the operands
_BY_ITEM = (names.Elemwise, names.DimShuffle, names.Join, names.Subtensor, *_LOOKUPS)
_ARITHMETIC = (
    scalar.Add, scalar.Sub, scalar.Mul, scalar.Mod, scalar.IntDiv, scalar.Cast, scalar.Identity,
)  # fmt: skip


def cut_windows(
    givens: Sequence[tuple[Variable, Any]], index: Sequence[Variable], divided: Mapping[Variable, int]
) -> Windows:
    """See `synkhronos.engines.base.Engine.cut_windows`."""
    found = find_windows(givens, index, divided)
    if not found.axes:
        return Windows(givens, [], [], {}, found.whole)
    bounds = [tensor.lscalar("first_row"), tensor.lscalar("last_row")]
    found.divide(slice(*bounds))
    cut, lengths = [], []
    for old, new in givens:
        if old in found.axes:
            axis = found.axes[old]
            lengths.append(new.shape[axis])
            new = found.part_of(new, axis)
        cut.append((old, new))
    return Windows(cut, bounds, lengths, found.axes, found.whole)


def find_windows(
    givens: Sequence[tuple[Variable, Any]], index: Sequence[Variable], divided: Mapping[Variable, int]
) -> Selection:
    """Return which new values of givens an index selects.

    Parameters
    ----------
    givens : list of pairs
    index : list of variables
        The inputs that may select rows.
    divided : dict
        The axis of the rows of each variable of which the ranks have different rows.

    Raises
    ------
    ValueError
        If an index selects from the different rows of the ranks, or if it is not known along which axis
        the selected rows are.
    """
    indices = set(index)
    news = {old: new for old, new in givens if isinstance(new, Variable)}
    news = {old: new for old, new in news.items() if not indices.isdisjoint(names.ancestors([new]))}
    selection = Selection(index, divided, list(news.values()))
    for old, new in news.items():
        if new in selection.rows and new in selection.own:
            raise _refusal(old, new, index, divided)
        if new in selection.rows and selection.value(new) is None:
            raise _refusal(old, new, index)
        axis = selection.axis_of(new)
        if axis is not None and not _is_fixed(old, axis):
            selection.axes[old] = axis
        elif new not in selection.own and (new in selection.selected or getattr(new, "ndim", None)):
            selection.whole.append(old)
    return selection


def _is_fixed(variable: Variable, axis: int) -> bool:
    """Whether the type of a variable fixes its extent along an axis."""
    if hasattr(variable.type, "shape"):
        return variable.type.shape[axis] is not None
    return getattr(variable.type, "broadcastable", {axis: False})[axis]


class Selection(RowAxes):
    """Follows an index through a graph.

    Attributes
    ----------
    axes : dict
        For each variable of givens whose new value has rows that an index selects: their axis.
    whole : list of variables
        The other variables of givens whose new values depend on an index.
    nodes : list
        The nodes of the graph, inputs first.
    selected : set of variables
        The variables that are computed from values that an index has selected.
    rows : set of variables
        The variables among them that have rows which an index has selected, even if the axis is unknown.
    own : set of variables
        The variables that are computed from variables of which the ranks have different rows.
    """

    def __init__(
        self, index: Sequence[Variable], divided: Mapping[Variable, int], roots: Sequence[Variable]
    ) -> None:
        super().__init__(divided)
        self.axes: dict[Variable, int] = {}
        self.whole: list[Variable] = []
        self._parts: dict[Variable, Variable] = {}
        self._dependent, self._numbers = set(index), set(index)
        self.selected: set[Variable] = set()
        self.rows: set[Variable] = set()
        self.own = set(divided)
        self.nodes = names.io_toposort([*index, *divided], roots)
        for node in self.nodes:
            self.add(node)

    def add(self, node: Apply) -> None:
        super().add(node)
        value = self.value(node.outputs[0])
        is_shape = isinstance(node.op, names.Shape)
        may_have_rows = (value is None or value.axis is not None) and not is_shape
        if may_have_rows and not self.rows.isdisjoint(node.inputs):
            self.rows.update(node.outputs)
        for group in (self._dependent, self.selected, self.own):
            if not group.isdisjoint(node.inputs):
                group.update(node.outputs)
        if not self._numbers.isdisjoint(_summands(node)):
            self._numbers.update(node.outputs)

    def axis_of(self, variable: Variable) -> int | None:
        """Return the axis of the rows that an index has selected for a variable, or None."""
        value, is_own = self.value(variable), variable in self.own
        if variable in self.rows or (variable in self.selected and not is_own):
            return None if value is None else value.axis
        return 0 if self.are_row_numbers(variable) and not is_own else None

    def are_row_numbers(self, variable: Variable) -> bool:
        """Whether a variable may number rows: integers to which an index is added, as to `arange`."""
        is_vector = getattr(variable, "ndim", 0) == 1 and variable.type.dtype.startswith(("int", "uint"))
        return is_vector and variable in self._numbers

    # Rules

    def by_rule(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        unknown = [variable for variable, value in zip(node.inputs, values) if value is None]
        return super().by_rule(node, values) if self.rows.isdisjoint(unknown) else None

    def indexed(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        value, entries = values[0], get_idx_list(node.inputs, node.op.idx_list)
        axes = [axis for axis, entry in enumerate(entries) if self._depends(entry)]
        if not axes or value is None or value.axis not in (None, *axes):
            return super().indexed(node, values)
        slices = [axis for axis in axes if isinstance(entries[axis], slice)]
        self._select(node, has_rows=slices or node.inputs[0] in self.own)
        if value.axis is not None or not slices:
            return super().indexed(node, values)
        if of_unlisted(values[1:]) is None or (len(slices) > 1 and slices[0]):
            return None
        return Rows(axis_after(slices[0], entries), FIXED.degrees)

    def _select(self, node: Apply, has_rows: Any = True) -> None:
        self.selected.update(node.outputs)
        if has_rows:
            self.rows.update(node.outputs)

    def _depends(self, entry: Any) -> bool:
        ends = (entry.start, entry.stop) if isinstance(entry, slice) else (entry,)
        return any(isinstance(end, Variable) and end in self._dependent for end in ends)

    def looked_up(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        found, value = numbers_along(node), values[0]
        if self._dependent.isdisjoint(node.inputs[1:]):
            return super().looked_up(node, values)
        if value is None or found is None or found[0] == value.axis or values[-1] is None:
            self._select(node)
            return None
        if value.axis is not None or values[-1].axis is not None:
            return super().looked_up(node, values)
        self._select(node)
        return Rows(found[0], FIXED.degrees)

    def sparse(self, node: Apply, values: list[Rows | None]) -> Rows | None:
        value = values[0]
        if value is None or value.axis is not None or self._dependent.isdisjoint(node.inputs[1:]):
            return super().sparse(node, values)
        self._select(node)
        is_by_row = not self._dependent.isdisjoint(node.inputs[1:3])
        return Rows(0, FIXED.degrees) if is_by_row else None

    # The items between two bounds of everything that has rows which an index selects

    def divide(self, rows: slice) -> None:
        """Find the parts between bounds, computed from parts as far as possible."""
        self._rows = rows
        for node in self.nodes:
            value = self.value(node.outputs[0]) if len(node.outputs) == 1 else None
            if value is not None and value.axis is not None and node.outputs[0] in self.rows:
                part = self._computed(node, value.axis)
                if part is not None:
                    self._parts[node.outputs[0]] = part

    def part_of(self, variable: Variable, axis: int) -> Variable:
        """Return the part of a variable along an axis."""
        value = self.value(variable)
        if variable in self._parts and value is not None and value.axis == axis:
            return self._parts[variable]
        return variable[(slice(None),) * axis + (self._rows,)]

    def _computed(self, node: Apply, axis: int) -> Variable | None:
        """Return the part of an output, computed from parts; None if that is not possible."""
        rule = rule_of(node) if isinstance(node.op, _BY_ITEM) else None
        label = None if rule is None else rule.outputs[0][axis]
        if rule is None or label is None or isinstance(label, Part):
            return None
        return node.op(
            *[
                self.part_of(variable, labels.index(label)) if labels and label in labels else variable
                for variable, labels in zip(node.inputs, rule.inputs)
            ]
        )


def _summands(node: Apply) -> Sequence[Variable]:
    """Return the operands of a node that computes integers, as far as they can shift row numbers."""
    if isinstance(node.op, names.ARange):
        return node.inputs[:1]
    if isinstance(node.op, names.Elemwise):
        return node.inputs if isinstance(node.op.scalar_op, _ARITHMETIC) else ()
    return node.inputs if isinstance(node.op, (names.DimShuffle, names.MakeVector, names.Join)) else ()


# Errors


def how_to_select(replaced: str, index: str) -> str:
    """Return what to write if rows that an index selects for a variable cannot be divided."""
    return (
        f"Let givens replace a variable by rows of a shared variable alone, as in "
        f"data[{index} * size : ({index} + 1) * size] or data[numbers], and compute the rest from this "
        f"variable in the graph; or make {replaced} an input, and give the selected rows in each call. "
        f"To have every rank compute on all of them, give {index} in bcast_inputs"
    )


def listed(variables: Iterable[Variable]) -> str:
    """Return how messages refer to several variables."""
    return _text.listed(map(name_of, variables))


def _used_in(new: Variable, variables: Iterable[Variable]) -> list[Variable]:
    found = set(names.ancestors([new]))
    return [variable for variable in variables if variable in found]


def _refusal(
    old: Variable, new: Variable, index: Sequence[Variable], own: Iterable[Variable] = ()
) -> ValueError:
    """Return the error for rows that an index selects; `own` are variables with rows of a rank."""
    selecting, found = listed(_used_in(new, index)), _used_in(new, own)
    if found:
        why = (
            f"{selecting} selects from the rows of {listed(found)}, or together with them, of which "
            f"each rank has rows of its own. Select from other shared variables alone, and compute the "
            f"rest in the graph. If each rank shall select from its own rows, give {selecting} in "
            f"bcast_inputs"
        )
        return ValueError(f"givens: {name_of(old)} is replaced by a value that {why}")
    return ValueError(
        f"givens: {name_of(old)} is replaced by a value of rows that {selecting} selects, but it is not "
        f"known along which axis they are, so they cannot be divided among the ranks. "
        f"{how_to_select(name_of(old), selecting)}"
    )
