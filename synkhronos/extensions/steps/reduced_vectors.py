"""The shared variables in which a training step reduces the values of the ranks.

Averages are stored in the memory of a variable if one process computes the new value there, as the
script may have a reference to its array.
"""

from __future__ import annotations

from typing import Any, Tuple

import numpy

from synkhronos.engines import names
from synkhronos.engines.names import Elemwise, SharedVariable, Variable, scalar
from synkhronos.engines.names import tensor as tt
from synkhronos.extensions._flat_gradient import Layout

#: Of an expression: the dtype, the operation, whether it is a gradient, and the position in the vector
Place = Tuple[str, str, bool, int]


class ReducedVectors:
    """Vectors that hold the values to reduce, one for each dtype and operation; gradients are separate.

    Attributes
    ----------
    updates : list of (shared, new, op)
        What each rank computes on its rows; `op` combines slices of the rows.
    reduced : dict
        For each operation, the shared variables to reduce.
    gradients : list of shared variables
        The variables that hold gradients.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str, bool], list[tuple[Variable, tuple[int, ...]]]] = {}
        self._pieces: dict[tuple[str, str, bool], list[Variable]] = {}
        self.updates: list[tuple[SharedVariable, Variable, str | None]] = []
        self.reduced: dict[str, list[SharedVariable]] = {}
        self.gradients: list[SharedVariable] = []

    def add(
        self, expression: Variable, op: str, shape: tuple[int, ...], is_gradient: bool = False
    ) -> Place:
        """Reserve a place in a vector for an expression; return it."""
        key = expression.dtype, op, is_gradient
        group = self._groups.setdefault(key, [])
        group.append((expression, shape))
        return (*key, len(group) - 1)

    def add_whole(self, new: Variable, op: str, like: SharedVariable) -> SharedVariable:
        """Return a new shared variable for an expression of the type of `like`, to be reduced."""
        value = numpy.zeros_like(like.get_value(borrow=True))
        name = f"new_{like.name}" if like.name else None
        shared = names.shared(value, name, like.type.broadcastable)
        self.add_update(shared, new, op)
        return shared

    def add_update(self, shared: SharedVariable, new: Variable, op: str) -> None:
        """Let each rank compute `shared`, which is then reduced."""
        self.updates.append((shared, new, op))
        self.reduced.setdefault(op, []).append(shared)

    def build(self) -> None:
        """Create the vectors; nothing can be added to them afterwards."""
        for key, group in self._groups.items():
            dtype, op, is_gradient = key
            expressions = [expression for expression, _ in group]
            patterns = [expression.type.broadcastable for expression in expressions]
            layout = Layout([shape for _, shape in group], patterns)
            vector = layout.new_vector(dtype, f"flat_{op}")
            if is_gradient:
                self.gradients.append(vector)
            self.add_update(vector, layout.filled(vector, expressions), op)
            self._pieces[key] = list(layout.pieces(vector))

    def reduced_at(self, place: Place | SharedVariable) -> Variable:
        """Return the reduced value of the expression at a place, or of a variable of its own."""
        if isinstance(place, SharedVariable):
            return place
        dtype, op, is_gradient, position = place
        return self._pieces[dtype, op, is_gradient][position]

    def clearing(self) -> list[tuple[SharedVariable, Variable]]:
        """Return updates that keep ranks without rows from taking part in the reduction.

        An average ignores these ranks. In other operations they take part with the values of their
        variables, which must therefore be neutral.
        """
        return [
            (shared, _filled_with(shared, _neutral(op, shared.dtype)))
            for op, shareds in self.reduced.items()
            if op != "avg"
            for shared in shareds
        ]


def _neutral(op: str, dtype: str) -> Any:
    if op == "sum":
        return 0
    if dtype == "bool":
        return op == "min"
    if numpy.issubdtype(dtype, numpy.floating):
        return numpy.inf if op == "min" else -numpy.inf
    return numpy.iinfo(dtype).max if op == "min" else numpy.iinfo(dtype).min


def _filled_with(shared: SharedVariable, value: Any) -> Variable:
    number = tt.constant(numpy.asarray(value, shared.dtype))
    if not shared.ndim:
        return number
    return tt.set_subtensor(shared[:], number)  # in place, so that it stays in shared memory


class _Replaced(scalar.Second):
    """``(old, new)`` to `new`, in the memory of `old` if the mode computes in place.

    As it is not ``fill`` itself, the compiler does not replace it by `new`.
    """


_replaced = Elemwise(_Replaced(scalar.second.output_types_preference, name="replaced"))


def is_in_place(target: SharedVariable, new: Variable) -> bool:
    """Whether one process computes the new value of a variable in the memory of the old value."""
    node = new.owner
    if node is None:
        return False
    if isinstance(node.op, names.WRITES):
        return node.inputs[0] is target
    if not isinstance(node.op, Elemwise):
        return False
    return any(variable is target or is_in_place(target, variable) for variable in node.inputs)


def in_place(target: SharedVariable, new: Variable) -> Variable:
    """Return a value of the shape of a variable, computed in the memory of its old value."""
    return _replaced(target, new)
