"""Optimizations of Theano graphs that replace operations."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

from theano.gof import Apply, Op, Variable, local_optimizer
from theano.gof.opt import copy_stack_trace
from theano.tensor.opt import in2out


class Optimization(NamedTuple):
    """An optimization of a graph.

    Attributes
    ----------
    name : str
        As in Theano's flag ``optimizer_excluding``.
    position : float
        When it is applied. Theano chooses its convolutions at 48.6, fuses elementwise operations at 49,
        and computes them inplace from 75 on.
    optimizer : theano.gof.Optimizer
        The optimizer of a whole graph.
    """

    name: str
    position: float
    optimizer: object


def with_traces(olds: Sequence[Variable], news: list[Variable]) -> list[Variable]:
    """Return new variables, with the lines of the script that created the old variables, for errors."""
    for old, new in zip(olds, news):
        copy_stack_trace(old, new)
    return news


def at_each_node(local: Any, position: float) -> Optimization:
    """Return an optimization that applies a local optimizer of Theano to each node."""
    return Optimization(local.__name__, position, in2out(local, name=local.__name__))


def replacing(
    name: str, position: float, kinds: list[type[Op]], replacement_of: Callable[[Apply], Op | None]
) -> Optimization:
    """Return an optimization that replaces single operations by operations with the same inputs.

    Parameters
    ----------
    name, position
        As in `Optimization`.
    kinds : list of type
        The operations that may be replaced, as instances of exactly these classes.
    replacement_of : callable
        ``replacement_of(node)`` returns an operation, or None to keep Theano's.
    """

    @local_optimizer(kinds)
    def local(node: Apply) -> list[Variable] | None:
        if type(node.op) not in kinds:
            return None
        op = replacement_of(node)
        return None if op is None else with_traces(node.outputs, op.make_node(*node.inputs).outputs)

    local.__name__ = name
    return at_each_node(local, position)
