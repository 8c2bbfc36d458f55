"""Expressions as sums of terms, by the linear operations at their end."""

from __future__ import annotations

from typing import Iterator, Mapping, Optional, Sequence, Tuple

from synkhronos.engines import names
from synkhronos.engines.analysis.graphs import Dependence, inputs_first, is_fill_of_one_number
from synkhronos.engines.analysis.rules import Powers, Rule, Terms, rule_of
from synkhronos.engines.names import Apply, DimShuffle, Elemwise, Sum, Variable, ViewOp, scalar
from synkhronos.engines.names import tensor as tt

#: Operations through which a sum is followed
_SPLIT = (Elemwise, names.Reshape, *names.LINEAR)

Parts = Tuple[Optional[Variable], Optional[Variable]]


def linear_operands(node: Apply | None, local: Dependence) -> Sequence[Variable]:
    """Return the inputs in which the output of a node is linear, with all other inputs constant.

    None of the others depends on the sources of `local`. If no such inputs exist, the result is empty.
    """
    if node is None or is_fill_of_one_number(node):
        return () if node is None else node.inputs[1:]
    if names.is_sum_with_sparse(node.op):
        return node.inputs
    rule = rule_of(node) if isinstance(node.op, _SPLIT) else None
    if rule is None:
        return ()
    if isinstance(rule.values, Powers):
        chosen = [place for place, variable in enumerate(node.inputs) if local.of(variable)]
        is_linear = len(chosen) == 1 and rule.values.exponents[chosen[0]] == 1
        return [node.inputs[chosen[0]]] if is_linear else ()
    terms = [node.inputs[place] for place in rule.operands(len(node.inputs))]
    if any(item not in terms and local.of(item) for item in node.inputs) or not _are_added(rule):
        return ()
    is_cast = isinstance(getattr(node.op, "scalar_op", None), scalar.Cast)
    dtypes = [variable.type.dtype for variable in [*node.inputs, *node.outputs] if is_cast]
    return terms if all(dtype.startswith("float") for dtype in dtypes) else ()


def _are_added(rule: Rule) -> bool:
    """Whether all operands whose values count are terms, and not chosen from."""
    return isinstance(rule.values, Terms) and rule.values.operands in (None, (0,))


def terms(
    variable: Variable, local: Dependence, until_sums: bool = False
) -> Iterator[tuple[Variable, bool]]:
    """Yield ``(term, whether it was summed over an axis)`` for the terms that depend on the sources.

    With `until_sums`, a sum over an axis is a term itself.
    """
    stack = [(variable, False)]
    while stack:
        one, is_summed = stack.pop()
        is_sum = one.owner is not None and isinstance(one.owner.op, Sum) and one.owner.inputs[0].ndim > 0
        parts = () if until_sums and is_sum else linear_operands(one.owner, local)
        if not parts:
            yield one, is_summed or (until_sums and is_sum)
        else:
            stack.extend([(part, is_summed or is_sum) for part in reversed(parts) if local.of(part)])


def split(variable: Variable, local: Dependence) -> Parts:
    """Return ``(dependent, free)``, whose sum is the variable; either may be None.

    The second does not depend on the sources of `local`. A variable that cannot be divided is dependent.
    """

    def parents(variable: Variable) -> Sequence[Variable]:
        return linear_operands(variable.owner, local) if local.of(variable) else ()

    divided: dict[Variable, Parts] = {}
    for item in inputs_first([variable], parents, done=divided):
        divided[item] = _split(item, parents(item), divided) if local.of(item) else (None, item)
    return divided[variable]


def _split(variable: Variable, operands: Sequence[Variable], divided: Mapping[Variable, Parts]) -> Parts:
    """Return the parts of a dependent variable, given the parts of its linear operands."""
    node = variable.owner
    if all(divided[operand][1] is None for operand in operands):
        return variable, None
    if is_fill_of_one_number(node):
        return divided[operands[0]]
    if len(operands) > 1:
        return _joined(variable, divided, 0), _joined(variable, divided, 1)
    dependent, free = divided[operands[0]]
    if dependent is None or not _is_kept_whole(node, free):
        return variable, None
    return _applied(variable, operands[0], dependent), _applied(variable, operands[0], free)


def _is_kept_whole(node: Apply, free: Variable) -> bool:
    """Whether the operation does not depend on the extents of axes that the free part lacks."""
    is_elementwise = isinstance(node.op, (Elemwise, DimShuffle, ViewOp))
    return is_elementwise or free.type.broadcastable == node.inputs[0].type.broadcastable


def _joined(variable: Variable, divided: Mapping[Variable, Parts], which: int) -> Variable | None:
    """Return the sum or difference of the dependent, or of the free parts of the operands."""
    node = variable.owner
    is_difference = isinstance(getattr(node.op, "scalar_op", None), scalar.Sub)
    signs = [1, -1] if is_difference else [1] * len(node.inputs)
    total = None
    for sign, operand in zip(signs, node.inputs):
        part = divided[operand][which]
        if part is not None:
            part = names.dense(part if sign > 0 else -part)
            total = part if total is None else total + part
    if total is None:
        return None
    total = tt.cast(total, variable.type.dtype)
    if which == 0 and total.type.broadcastable != variable.type.broadcastable:
        # The free part has axes that this one lacks.
        total = total + tt.zeros_like(_joined(variable, divided, 1))
    return total


def _applied(variable: Variable, operand: Variable, part: Variable) -> Variable:
    node = variable.owner
    inputs = [part if item is operand else item for item in node.inputs]
    return node.op(*inputs)
