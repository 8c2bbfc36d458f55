"""On which of several sources, such as the rows or random streams, an expression depends."""

from __future__ import annotations

from typing import Container, Iterable, Mapping

from synkhronos._text import listed
from synkhronos.engines.names import Variable
from synkhronos.extensions.steps.traversal import inputs_first, label, operands_of_values


class Dependence:
    """Which of the `sources` each variable depends on, as a bit mask.

    Parameters
    ----------
    sources : list of variables
        The sources, in the order of their bits.
    givens : dict
        The compiler's substitutions: a variable depends on what replaces it.
    independent : container of variables
        Variables that count as independent, no matter what they are computed from.

    Attributes
    ----------
    sources : list of variables
        The sources, in the order of their bits.
    parents : callable
        ``parents(variable)`` returns the variables that the value of a variable depends on directly.
    """

    def __init__(
        self,
        sources: Iterable[Variable],
        givens: Mapping[Variable, Variable],
        independent: Container[Variable] = (),
    ) -> None:
        self.sources = list(dict.fromkeys(sources))
        self.parents = operands_of_values(givens, independent)
        self._bits = {source: 1 << position for position, source in enumerate(self.sources)}
        self._masks: dict[Variable, int] = {}

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
