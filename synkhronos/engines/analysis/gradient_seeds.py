"""The seeds of gradients: a compiler's ``grad`` begins with the derivative of the loss by itself, 1."""

from __future__ import annotations

from typing import Iterable, Sequence

from synkhronos.engines.collectives import Collective
from synkhronos.engines.names import Apply, Constant, Elemwise, Variable, scalar


def is_fill_of_one_number(node: Apply) -> bool:
    """Whether a node fills the shape of its first input, a single number, with its second input.

    The result does not depend on the value of the first input. The gradient of every loss begins with
    such a node.
    """
    return (
        isinstance(node.op, Elemwise)
        and isinstance(node.op.scalar_op, scalar.Second)
        and all(node.inputs[0].type.broadcastable)
        and node.inputs[1].type == node.outputs[0].type
    )


def is_seed(variable: Variable) -> bool:
    """Whether a variable is the seed of the gradient of a loss, which is the first input of its node."""
    node = variable.owner
    if node is None or not is_fill_of_one_number(node) or variable.type.ndim:
        return False
    loss, one = node.inputs
    return loss.owner is not None and isinstance(one, Constant) and one.data == 1


def loss_ops(nodes: Iterable[Apply], results: Sequence[Variable]) -> list[frozenset[str]]:
    """Return, for each result, the set of the `loss_op` of the collectives that its gradients pass.

    Parameters
    ----------
    nodes : list of nodes
        Of the graph, in topological order.
    results : list of variables
    """
    found: dict[Variable, frozenset[str]] = {}  # of the variables that are computed from seeds
    for node in nodes:
        passed = [found[one] for one in node.inputs if one in found]
        together = frozenset().union(*passed)
        outputs = node.outputs
        if isinstance(node.op, Collective):
            outputs = outputs[1:]  # without the peers
            if node.op.loss_op is not None:  # as of a `BucketReady`
                together |= {node.op.loss_op}
        found.update((one, together) for one in outputs if passed or is_seed(one))
    return [found.get(one, frozenset()) for one in results]
