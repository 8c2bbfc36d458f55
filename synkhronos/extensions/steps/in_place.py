"""Updates that are made in the memory of a variable, to whose array the script may have a reference."""

from __future__ import annotations

from synkhronos.engines import names
from synkhronos.engines.names import Elemwise, SharedVariable, Variable, scalar


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
    return any(one is target or is_in_place(target, one) for one in node.inputs)


def in_place(target: SharedVariable, new: Variable) -> Variable:
    """Return a value of the shape of a variable, computed in the memory of its old value."""
    return _replaced(target, new)
