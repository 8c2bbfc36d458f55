"""The losses of the gradients in expressions."""

from __future__ import annotations

from typing import Callable, Iterable, Sequence

from synkhronos.engines.analysis.gradient_seeds import is_seed
from synkhronos.engines.names import Variable
from synkhronos.extensions.steps.graphs import inputs_first, operands


def seeds_of(
    expressions: Iterable[Variable], parents: Callable[[Variable], Sequence[Variable]] = operands
) -> dict[Variable, Variable]:
    """Return the seeds of the gradients that expressions are computed from, each with its loss.

    A loss may itself contain gradients, such as a penalty on them. Their seeds are not included.
    """

    def until_seeds(variable: Variable) -> Sequence[Variable]:
        return () if is_seed(variable) else parents(variable)

    reached = inputs_first(expressions, until_seeds)
    seeds = {one: one.owner.inputs[0] for one in reached if is_seed(one)}
    inner = set(inputs_first(seeds.values(), parents))
    return {seed: loss for seed, loss in seeds.items() if seed not in inner}
