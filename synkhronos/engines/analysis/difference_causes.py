"""Why the value of all rows may differ from the value that the values of parts of the rows give.

The graph does not tell whether a result differs, only what to look at if it does.
"""

from __future__ import annotations

from typing import Iterator, Mapping, Sequence

from synkhronos.engines import names
from synkhronos.engines.analysis.rows import RowGraph, Rows
from synkhronos.engines.analysis.shapes import normalized_axes
from synkhronos.engines.base import BOUND
from synkhronos.engines.names import Apply, Variable, io_toposort, scalar

#: The possible causes, as names
CONSTANT, QUOTIENT, STATISTICS, NONLINEAR, CLIPPED, RECURRENT, FIXED_BATCH = DIFFERENCE_CAUSES = (
    "constant", "quotient", "statistics", "nonlinear", "clipped", "recurrent", "fixed batch",
)  # fmt: skip

#: How a value depends on the rows: not at all, on their number, on several of them, or row by row.
_NONE, _COUNT, _MIXED, _ROWS = range(4)

_LINEAR = (scalar.Add, scalar.Sub, scalar.Neg, scalar.Cast, scalar.Identity, scalar.Second)
_SCALED = (scalar.Mul, scalar.TrueDiv, scalar.IntDiv)
_CLIPPING = ("GradClip", "_ClipGradient")
_NORMALIZING = ("AbstractBatchNormTrain",)


def difference_causes(
    inputs: Sequence[Variable], axes: Sequence[int | str | None], outputs: Sequence[Variable]
) -> list[str]:
    """Return which of `DIFFERENCE_CAUSES` a graph has.

    Parameters
    ----------
    inputs : list of variables
    axes : list of int, None or `BOUND`
        The axis of each input along which its rows are split.
    outputs : list of variables
    """
    search = _Search(dict(zip(inputs, axes)))
    for node in io_toposort(inputs, outputs):
        search.visit(node)
    return [one for one in DIFFERENCE_CAUSES if one in search.found]


class _Search:
    def __init__(self, axes: Mapping[Variable, int | str | None]) -> None:
        self.found: set[str] = set()
        self._graph = RowGraph(axes)
        self._kinds = {
            variable: _COUNT if axis == BOUND else _NONE if axis is None else _ROWS
            for variable, axis in axes.items()
        }

    def visit(self, node: Apply) -> None:
        """Find how the outputs of a node depend on the rows, and which causes it adds."""
        self._graph.add(node)
        kinds = [self._kinds.get(one, _NONE) for one in node.inputs]
        kind = self._kind(node, kinds)
        for output in node.outputs:
            self._kinds[output] = kind
        self.found |= set(self._causes(node, kinds))

    def _kind(self, node: Apply, kinds: list[int]) -> int:
        if isinstance(getattr(node.op, "scalar_op", None), scalar.Second):
            return _ROWS if kinds[0] == _ROWS else kinds[1]  # only the shape of the first matters
        most = max(kinds, default=_NONE)
        if isinstance(node.op, (names.Shape, names.Shape_i)):
            return _COUNT if most == _ROWS else _NONE
        if most != _ROWS:
            return most
        known = self._graph.value(node.outputs[0])
        if known is not None:
            return _MIXED if known.axis is None else _ROWS
        if isinstance(node.op, (names.CAReduce, *names.LARGEST)):
            return _MIXED if self._reduces_rows(node) else _ROWS
        return _ROWS

    def _reduces_rows(self, node: Apply) -> bool:
        value, axes = self._graph.value(node.inputs[0]), node.op.axis
        if axes is None:
            return True
        axis = 0 if value is None or value.axis is None else value.axis
        return axis in normalized_axes(axes, node.inputs[0].ndim)

    def _causes(self, node: Apply, kinds: list[int]) -> Iterator[str]:
        op, name = node.op, type(node.op).__name__
        if isinstance(op, names.Elemwise):
            yield from self._of_elementwise(node, kinds)
        if name in _CLIPPING and _ROWS in kinds:
            yield CLIPPED
        if name in _NORMALIZING and _ROWS in kinds:
            yield STATISTICS
        if isinstance(op, names.Scan) and self._runs_along_rows(node):
            yield RECURRENT
        if _ROWS in kinds[:1] and _fixes_rows(node, self._graph.value(node.inputs[0])):
            yield FIXED_BATCH

    def _of_elementwise(self, node: Apply, kinds: list[int]) -> Iterator[str]:
        op, known = node.op.scalar_op, self._graph.value(node.outputs[0])
        mixed = kinds.count(_MIXED)
        if not mixed:
            return
        if _ROWS in kinds:
            if any(kind == _MIXED and one.ndim for kind, one in zip(kinds, node.inputs)):
                yield STATISTICS
        elif isinstance(op, scalar.TrueDiv) and mixed == 2:
            yield QUOTIENT
        elif isinstance(op, _SCALED) and mixed == 1 and kinds[0] == _MIXED or _NONE in kinds:
            if isinstance(op, scalar.IntDiv) or (known is not None and known.degrees == {1}):
                yield CONSTANT
            elif not isinstance(op, (*_SCALED, *_LINEAR)):
                yield NONLINEAR
        elif not isinstance(op, _LINEAR):
            yield NONLINEAR

    def _runs_along_rows(self, node: Apply) -> bool:
        """Whether the steps of a recurrence are rows."""
        counts = node.op if hasattr(node.op, "n_sit_sot") else node.op.info
        if not counts.n_mit_mot + counts.n_mit_sot + counts.n_sit_sot:
            return False
        return any(self._has_rows_first(one) for one in node.op.outer_seqs(node.inputs))

    def _has_rows_first(self, variable: Variable) -> bool:
        value, node = self._graph.value(variable), variable.owner
        if value is None and node is not None and isinstance(node.op, names.Subtensor):
            return self._has_rows_first(node.inputs[0])  # the first steps, as many as there are
        return value is not None and value.axis == 0


def _fixes_rows(node: Apply, value: Rows | None) -> bool:
    """Whether an operation expects a number of rows that is written in the graph."""
    if isinstance(node.op, names.CONVOLUTIONS):
        return bool(node.op.imshp) and node.op.imshp[0] is not None
    if isinstance(node.op, names.Reshape) and value is not None and value.axis == 0:
        shape = node.inputs[1]
        first = getattr(shape, "data", None)
        if first is None and shape.owner is not None and isinstance(shape.owner.op, names.MakeVector):
            first = [getattr(shape.owner.inputs[0], "data", None)]
        return first is not None and len(first) > 1 and first[0] is not None and first[0] > 0
    return False
