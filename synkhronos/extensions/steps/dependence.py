"""Finds on which sources an expression depends, and replaces parts of expressions."""

from __future__ import annotations

from typing import Callable, Container, Iterable, Mapping, Sequence

from synkhronos._text import listed
from synkhronos.engines.analysis.gradient_seeds import is_fill_of_one_number
from synkhronos.engines.names import Apply, Variable
from synkhronos.extensions.steps.graphs import inputs_first, label, operands


class Dependence:
    """Which of the `sources` each variable depends on, as a bit mask.

    Parameters
    ----------
    sources : list of variables
    givens : dict
        The compiler's substitutions: a variable depends on what replaces it.
    cuts : container of variables
        Variables that count as independent, no matter what they are computed from.
    """

    def __init__(
        self,
        sources: Iterable[Variable],
        givens: Mapping[Variable, Variable],
        cuts: Container[Variable] = (),
    ) -> None:
        self.sources = list(dict.fromkeys(sources))
        self.givens = givens
        self._bits = {source: 1 << position for position, source in enumerate(self.sources)}
        self._cuts = cuts
        self._masks: dict[Variable, int] = {}

    def parents(self, variable: Variable) -> Sequence[Variable]:
        """Return the variables that the value of a variable depends on directly."""
        if variable in self._cuts:
            return ()
        if variable in self.givens:
            return (self.givens[variable],)
        node = variable.owner
        if node is not None and is_fill_of_one_number(node):
            return node.inputs[1:]
        return operands(variable)

    def of(self, *variables: Variable) -> int:
        """Return the mask of some variables together."""
        together = 0
        for variable in variables:
            if variable not in self._masks:
                for one in inputs_first([variable], self.parents, done=self._masks):
                    mask = self._bits.get(one, 0)
                    for parent in self.parents(one):
                        mask |= self._masks[parent]
                    self._masks[one] = mask
            together |= self._masks[variable]
        return together

    def mask_of(self, sources: Iterable[Variable]) -> int:
        """Return the mask of some of the sources."""
        mask = 0
        for source in sources:
            mask |= self._bits[source]
        return mask

    def sources_in(self, mask: int) -> list[Variable]:
        """Return the sources in a mask."""
        return [source for source in self.sources if self._bits[source] & mask]

    def labels_in(self, mask: int) -> str:
        """Return the sources in a mask as text."""
        return listed(label(source) for source in self.sources_in(mask))


def rebuilt(
    variables: Sequence[Variable],
    replacements: Mapping[Variable, Variable],
    givens: Mapping[Variable, Variable],
    apply: Callable[[Apply, list[Variable]], Sequence[Variable]] | None = None,
) -> list[Variable]:
    """Return expressions with variables replaced by others of the same type.

    Scalar variables whose shape is all that is used are left out: they do not count as a dependence, and
    may have no replacement. With `apply`, ``apply(node, inputs)`` returns the outputs of each node for
    what its inputs are replaced by.
    """
    copies = dict(replacements)
    parents = Dependence((), givens).parents
    for variable in inputs_first(variables, parents, done=copies):
        node = variable.owner
        if node is None or variable in givens:  # which the compiler replaces when it compiles
            copies[variable] = variable
        elif is_fill_of_one_number(node):
            copies[variable] = copies[node.inputs[1]]
        else:
            inputs = [copies[one] for one in node.inputs]
            outputs = (apply or with_inputs)(node, inputs)
            for old, new in zip(node.outputs, outputs):
                copies.setdefault(old, new)
    return [copies[variable] for variable in variables]


def with_inputs(node: Apply, inputs: Sequence[Variable]) -> Sequence[Variable]:
    """Return the outputs of the same operation for other inputs."""
    is_same = all(new is old for new, old in zip(inputs, node.inputs))
    return node.outputs if is_same else node.clone_with_new_inputs(inputs).outputs
