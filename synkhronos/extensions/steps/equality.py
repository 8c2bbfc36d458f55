"""Which expressions compute the same value: the same operations on the same variables."""

from __future__ import annotations

from typing import Any, Hashable

from synkhronos.engines.names import Constant, Variable
from synkhronos.extensions.steps.traversal import inputs_first


class Numbering:
    """Gives equal numbers to expressions that are equal in structure.

    A compiler's ``grad`` builds a new graph whenever it is called, so a gradient that an update rule has
    computed is not the same variable as the gradient of the same loss computed again. Each combination
    of an operation and the numbers of its operands gets a number, as in a compiler's value numbering.
    """

    def __init__(self) -> None:
        self._by_variable: dict[Variable, int] = {}
        self._by_structure: dict[Hashable, int] = {}

    def of(self, variable: Variable) -> int:
        """Return the number of a variable."""
        for one in inputs_first([variable], done=self._by_variable):
            number = self._by_structure.setdefault(self._structure(one), len(self._by_structure))
            self._by_variable[one] = number
        return self._by_variable[variable]

    def _structure(self, variable: Variable) -> Hashable:
        node = variable.owner
        if node is not None:
            numbers: list[Any] = [self._by_variable[one] for one in node.inputs]
            return (node.op, node.outputs.index(variable), variable.type, *numbers)
        if isinstance(variable, Constant):
            try:
                signature = variable.signature()
                hash(signature)
            except TypeError:  # its value has no hash; it is equal to itself only
                return variable
            return signature
        return variable
