"""The arguments that describe a step, each checked and converted to one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Sequence

import numpy

import synkhronos as synk
from synkhronos._text import shortened
from synkhronos.engines.analysis.graphs import is_random_state
from synkhronos.engines.names import SharedVariable, Variable, package
from synkhronos.extensions._parameters import check_loss
from synkhronos.extensions.steps.marked_expressions import check_operation


class Update(NamedTuple):
    """An update of a shared variable; `op` combines the ranks' values if these differ."""

    target: SharedVariable
    new: Variable
    op: str | None = "avg"
    has_op: bool = False  # whether the user gave the operation

    @property
    def is_own(self) -> bool:
        """Whether each rank keeps its own value."""
        return is_random_state(self.target) or (self.has_op and self.op is None)


class Output(NamedTuple):
    """An output, the form in which the user gave it, and the operation if the user gave one."""

    given: Any
    variable: Variable
    has_op: bool
    where: str  # how messages refer to it
    op: Any = None


def parse_variables(variables: Any, what: str) -> list[Any]:
    """Return a list of variables, or of wrappers of them; None stands for an empty one."""
    if variables is None:
        return []
    if not isinstance(variables, (list, tuple)):
        raise TypeError(f"{what}: expected a list of variables, got {shortened(variables)}")
    return list(variables)


def parse_updates(updates: Any, what: str = "updates") -> list[Update]:
    """Return a list of `Update`."""
    if isinstance(updates, Mapping):
        updates = list(updates.items())
    if updates is None:
        return []
    if not isinstance(updates, (list, tuple)):
        raise TypeError(
            f"{what}: expected a dict, or a list of (shared, new) or (shared, new, op), got "
            f"{type(updates).__name__}"
        )
    parsed: list[Update] = []
    for position, entry in enumerate(updates):
        parsed.append(_parse_update(entry, f"{what}[{position}]"))
    return parsed


def _parse_update(entry: Any, where: str) -> Update:
    if not isinstance(entry, (tuple, list)) or len(entry) not in (2, 3):
        raise TypeError(f"{where}: expected (shared, new) or (shared, new, op), got {shortened(entry)}")
    target, new, *op = entry
    if not isinstance(target, SharedVariable):
        raise TypeError(f"{where}: expected a shared variable, got {shortened(target)}")
    if not isinstance(new, Variable):
        new = target.type.filter_variable(new)
    if op and op[0] is not None:
        dtype = getattr(target.type, "dtype", None)
        check_operation(op[0], where, f"op of {target}", dtype)
        if op[0] == "sum" and dtype == "bool":
            raise TypeError(f"{where}: changes of {target} cannot be added, as it is bool; use 'max'")
    return Update(target, new, op[0] if op else "avg", bool(op))


def check_distinct(updates: Sequence[Update]) -> None:
    """Raise an error if a variable has two updates."""
    seen = set()
    for update in updates:
        if update.target in seen:
            raise ValueError(f"updates: {update.target} is updated more than once; give one update")
        seen.add(update.target)


def parse_output(given: Any, where: str) -> Output:
    """Return an `Output`: of a variable, ``(variable, op)``, or a wrapper with a ``variable``."""
    variable, has_op, op = given, False, None
    if isinstance(given, tuple):
        if len(given) != 2:
            raise ValueError(
                f"{where}: expected (variable, op), got {len(given)} items; give several outputs as a "
                f"list"
            )
        (variable, op), has_op = given, True
    elif not isinstance(given, Variable):
        variable, has_op = getattr(given, "variable", given), hasattr(given, "op")
        op = getattr(given, "op", None)
    if not isinstance(variable, Variable):
        raise TypeError(f"{where}: expected a variable or (variable, op), got {shortened(given)}")
    return Output(given, variable, has_op, where, op)


def parse_outputs(outputs: Any) -> tuple[list[Output], bool | list[str]]:
    """Return the outputs, and the form of a result: whether it is a list, or the keys of a dict."""
    if outputs is None:
        return [], True
    if isinstance(outputs, Mapping):
        keys = sorted(outputs)
        return [parse_output(outputs[key], f"outputs[{key!r}]") for key in keys], keys
    is_list = isinstance(outputs, list)
    each = outputs if is_list else [outputs]
    return [parse_output(item, f"outputs[{i}]") for i, item in enumerate(each)], is_list


def parse_givens(givens: Any) -> dict[Variable, Variable]:
    """Return a dict from each variable to the variable that replaces it."""
    if isinstance(givens, (str, Variable)):
        raise TypeError(f"givens: expected a dict or a list of pairs, got {shortened(givens)}")
    pairs = givens.items() if isinstance(givens, Mapping) else givens or ()
    parsed = {}
    for position, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], Variable):
            raise TypeError(f"givens[{position}]: expected (variable, value), got {shortened(pair)}")
        old, new = pair
        parsed[old] = new if isinstance(new, Variable) else package.shared(new)
    return parsed


def parse_losses(loss: Any) -> list[Variable]:
    """Return the losses that were given; raise an error if one is not a scalar float."""
    if loss is None:
        return []
    losses = list(loss) if isinstance(loss, (list, tuple)) else [loss]
    for item in losses:
        check_loss(item)
    return losses


def check_gradients(gradients: Any, params: Any) -> None:
    """Raise an error unless there is an expression of a gradient for each parameter."""
    if not isinstance(gradients, (list, tuple)) or params is None or len(gradients) != len(params):
        raise ValueError(
            "gradients: expected a list of gradient expressions, and as many params in the same order, "
            "as in gradients=grad(loss, params), params=params"
        )
    for position, gradient in enumerate(gradients):
        if not isinstance(gradient, Variable):
            raise TypeError(f"gradients[{position}]: expected an expression, got {gradient!r}")


def check_loss_op(loss_op: Any) -> None:
    """Raise an error unless losses can be combined with `loss_op`."""
    if loss_op not in ("avg", "sum"):
        raise ValueError(f"loss_op: expected 'avg' or 'sum', got {loss_op!r}")


def parse_wire(wire: Any) -> Any:
    """Return the wire format, which is checked further when it is used."""
    if wire is not None and not isinstance(wire, (str, synk.PowerSGD, synk.TopK)):
        raise TypeError(
            f"wire: expected the name of a format, synkhronos.PowerSGD(rank), synkhronos.TopK(fraction) "
            f"or None, got {wire!r}"
        )
    return wire


def parse_overlap(overlap: Any) -> bool:
    """Return whether to overlap."""
    if not isinstance(overlap, (bool, numpy.bool_)):
        raise TypeError(f"overlap: expected True or False, got {overlap!r}")
    return bool(overlap)
