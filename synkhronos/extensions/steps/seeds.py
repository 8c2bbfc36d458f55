"""The seeds of gradients: a compiler's ``grad`` begins with the derivative of the loss by itself, 1."""

from __future__ import annotations

from typing import Callable, Iterable, Sequence

from synkhronos.engines.names import Constant, Variable
from synkhronos.extensions.steps.graphs import inputs_first, is_fill_of_one_number, operands


def seeds_of(
    expressions: Iterable[Variable], parents: Callable[[Variable], Sequence[Variable]] = operands
) -> dict[Variable, Variable]:
    """Return the seeds of the gradients that expressions are computed from, each with its loss.

    A loss may itself contain gradients, such as a penalty on them. Their seeds are not included.
    """

    def until_seeds(variable: Variable) -> Sequence[Variable]:
        return () if _is_seed(variable) else parents(variable)

    reached = inputs_first(expressions, until_seeds)
    seeds = {one: one.owner.inputs[0] for one in reached if _is_seed(one)}
    inner = set(inputs_first(seeds.values(), parents))
    return {seed: loss for seed, loss in seeds.items() if seed not in inner}


def _is_seed(variable: Variable) -> bool:
    node = variable.owner
    if node is None or node.inputs == [] or variable.type.ndim or not is_fill_of_one_number(node):
        return False
    loss, one = node.inputs
    return loss.owner is not None and isinstance(one, Constant) and one.data == 1
