"""Follows a property of variables through graphs, and through the steps of the loops in them."""

from __future__ import annotations

from typing import Callable, Iterable, Sequence

from synkhronos.engines.names import Apply, Scan, Variable, steps_of
from synkhronos.extensions.steps.graphs import inputs_first

#: ``rule(node, having)`` returns the outputs that have a property if the variables `having` have it.
Rule = Callable[[Apply, "set[Variable]"], Sequence[Variable]]


def follow(variables: Iterable[Variable], having: set[Variable], rule: Rule) -> None:
    """Add to `having` those of some variables that have the property, given after their parents."""
    for variable in variables:
        node = variable.owner
        if node is not None and variable not in having and not having.isdisjoint(node.inputs):
            if isinstance(node.op, Scan):
                _, outputs = through_steps(node, having, rule)
                having.update(outputs)
            elif variable in rule(node, having):
                having.add(variable)


def through_steps(
    loop: Apply, having: set[Variable], rule: Rule
) -> tuple[set[Variable], list[Variable]]:
    """Return the variables of the steps of a loop, and the outputs of the loop, that have a property."""
    inputs, outputs = steps_of(loop.op)
    places = loop.op.get_oinp_iinp_iout_oout_mappings()
    found = {
        one
        for position, one in enumerate(inputs)
        if loop.inputs[places["outer_inp_from_inner_inp"][position]] in having
    }
    order, before = list(inputs_first(outputs)), -1
    while len(found) > before:  # a step gets the states of the step before it
        before = len(found)
        follow(order, found, rule)
        for position in _positions(outputs, found):
            found.update(inputs[one] for one in places["inner_inp_from_inner_out"].get(position, ()))
    ends = {places["outer_out_from_inner_out"].get(one, -1) for one in _positions(outputs, found)}
    return found, [loop.outputs[end] for end in sorted(ends - {-1})]


def _positions(variables, having):
    return [position for position, one in enumerate(variables) if one in having]


def nodes_with_steps(
    variables: Iterable[Variable], having: set[Variable], rule: Rule
) -> Iterable[tuple[Apply, set[Variable]]]:
    """Yield the nodes of variables, and those of the steps of loops, each with what has the property."""
    nodes = dict.fromkeys(one.owner for one in variables if one.owner is not None)
    for node in nodes:
        yield node, having
        if isinstance(node.op, Scan):
            inner, _ = through_steps(node, having, rule)
            yield from nodes_with_steps(inputs_first(steps_of(node.op)[1]), inner, rule)
