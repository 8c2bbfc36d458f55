"""The order in which all ranks run the collectives of a graph.

Independent collectives could run in any order. Therefore, after all other optimizations, each collective
gets the peers from the collective before it, and a number. This chain is part of the graph, so every
linker follows it, and so does every rank that receives the graph as a pickle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

from synkhronos.engines import names
from synkhronos.engines.bucketed_vector import schedule_buckets_early
from synkhronos.engines.collectives import ALONE, NOT_IN_SCAN, Collective, is_peers
from synkhronos.engines.names import (
    Apply,
    FunctionGraph,
    GraphRewriter,
    IfElse,
    Mode,
    SharedVariable,
    Variable,
    ancestors,
)

if TYPE_CHECKING:
    from synkhronos._typing import Compiled


def contain_collectives(
    roots: Sequence[Any], no_default_updates: bool | Sequence[SharedVariable] | None
) -> bool:
    """Whether expressions, or the default updates of their shared variables, contain collectives.

    Parameters
    ----------
    roots : list of variables
        The expressions.
    no_default_updates : bool or list of shared variables
        The same option as of the compiler's ``function``.
    """
    seen: set[Variable] = set()
    waiting = [root for root in roots if isinstance(root, Variable)]
    while waiting:
        new = set(ancestors(waiting)) - seen
        if ALONE in new:
            return True
        seen |= new
        updates = [getattr(item, "default_update", None) for item in new]
        waiting = [
            update
            for item, update in zip(new, updates)
            if update is not None
            and no_default_updates is not True
            and item not in (no_default_updates or ())
        ]
    return False


class _Ordering(GraphRewriter):
    """Orders the collectives of a graph: each takes the peers from the collective before it."""

    def add_requirements(self, fgraph: FunctionGraph) -> None:
        pass

    def apply(self, fgraph: FunctionGraph) -> None:
        peers, number = None, 0
        for node in fgraph.toposort():
            if isinstance(node.op, Collective):
                first = node.inputs[0] if peers is None else peers
                ordered = node.op.numbered(number)(first, *node.inputs[1:])  # computes test values, too
                fgraph.replace_all(list(zip(node.outputs, ordered)), reason="ordering")
                peers, number = ordered[0], number + 1


def ordering_mode(mode: Mode) -> Mode:
    """Return a mode that orders the collectives of a graph after all its own optimizations."""
    mode = names.package.compile.mode.get_mode(mode)
    last = _Ordering()
    optimizer = mode.provided_optimizer
    if isinstance(optimizer, GraphRewriter):
        ordered = mode.clone(optimizer=names.then(optimizer, last))
    else:
        ordered = mode.register((last, 1e6))
    if hasattr(ordered.linker, "schedule"):
        ordered.linker.schedule = schedule_buckets_early  # the mode and its linker are new
    return ordered


def check_order(compiled: Compiled) -> None:
    """Raise if the collectives of a compiled function are not in one chain, or some may be left out."""
    nodes = compiled.maker.fgraph.toposort()
    for node in nodes:
        is_user = any(map(is_peers, node.inputs))
        if is_user and not isinstance(node.op, Collective):
            raise TypeError(f"function: {node.op}: {NOT_IN_SCAN}")
    collectives = [node for node in nodes if isinstance(node.op, Collective)]
    for number, node in enumerate(collectives):
        before = collectives[number - 1].outputs[0] if number else None
        if node.op.number != number or (number and node.inputs[0] is not before):
            raise RuntimeError(f"function: {node} has no place in the order of the collectives")
    if any(isinstance(node.op, IfElse) for node in nodes):
        _check_not_lazy(compiled.maker.fgraph, collectives)


def _check_not_lazy(fgraph: FunctionGraph, collectives: list[Apply]) -> None:
    """Raise if a collective is computed for one branch of an ``ifelse`` only."""
    needed, waiting = set(), list(fgraph.outputs)
    while waiting:
        node = waiting.pop().owner
        if node is not None and node not in needed:
            needed.add(node)
            inputs = node.inputs[:1] if isinstance(node.op, IfElse) else node.inputs
            waiting.extend(variable for variable in inputs if not is_peers(variable))
    for node in collectives:
        if node not in needed:
            raise ValueError(
                f"function: {node} is computed for one branch of an ifelse only, which other ranks may "
                f"not take; use {names.tensor.__name__}.switch, which computes both, or let an output "
                f"use it"
            )


def takes_peers(compiled: Compiled) -> bool:
    """Whether a compiled function takes the peers as an argument."""
    return any(is_peers(spec.variable) and spec.variable is not ALONE for spec in compiled.maker.inputs)


def takes_from_master(compiled: Compiled) -> bool:
    """Whether some of the collectives of a compiled function take the master's value."""
    return any(getattr(node.op, "is_of_master", False) for node in compiled.maker.fgraph.apply_nodes)
