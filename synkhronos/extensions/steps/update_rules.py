"""Update rules from any source, converted to a common form."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple, Sequence

from synkhronos.engines.names import SharedVariable, Variable
from synkhronos.extensions.steps.marked_expressions import gradients


class AppliedRule(NamedTuple):
    """The result of an update rule.

    Attributes
    ----------
    updates : list of pairs, or dict
        The updates of the parameters.
    grad_updates : list of pairs, or dict
        The updates that write the gradients to shared variables, if the rule has such variables.
    grad_shared : list of shared variables
        These variables.
    is_marked : bool
        Whether the rule got marked gradients, so that gradients need not be searched for.
    """

    updates: Any
    grad_updates: Any
    grad_shared: list[SharedVariable]
    is_marked: bool = False


def apply_rule(
    rule: Any,
    loss: Variable,
    params: Sequence[SharedVariable],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> AppliedRule:
    """Return the `AppliedRule` of an update rule, or of ready updates.

    Raises
    ------
    TypeError
        If `rule` is neither, or arguments are given for ready updates.
    """
    if isinstance(rule, (Mapping, list, tuple)):
        if args or kwargs:
            raise TypeError(
                f"update_rule: got ready updates, which take no arguments, and arguments: "
                f"{[*args, *kwargs]}; leave them out, or give the rule itself"
            )
        return _normalized(rule, False)
    if hasattr(rule, "get_updates"):
        return _normalized(rule.get_updates(*args, loss=loss, params=params, **kwargs), False)
    if not callable(rule):
        raise TypeError(
            f"update_rule: expected a function such as updates.adam, an optimizer with get_updates(), "
            f"or updates as a dict or a list, got {rule!r}"
        )
    return _called(rule, loss, params, args, kwargs)


def _called(
    rule: Callable[..., Any],
    loss: Variable,
    params: Sequence[SharedVariable],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> AppliedRule:
    takes = _first_parameters(rule)
    wants_params_first = "param" in takes[0] and "param" not in takes[1]

    def call(first: Any) -> Any:
        pair = (params, first) if wants_params_first else (first, params)
        return rule(*pair, *args, **kwargs)

    name = takes[1] if wants_params_first else takes[0]
    if "grad" in name:
        return _normalized(call(gradients(loss, params)), True)
    if "loss" in name or "cost" in name:
        return _normalized(call(loss), False)
    try:
        return _normalized(call(loss), False)
    except Exception as error:  # a rule may fail in any way if it expects gradients
        try:
            return _normalized(call(gradients(loss, params)), True)
        except Exception:
            raise error from None


def _first_parameters(rule: Callable[..., Any]) -> tuple[str, str]:
    """Return the names of the first two parameters of a rule, as far as they can be known."""
    try:
        names = [name.lower() for name in inspect.signature(rule).parameters]
    except (TypeError, ValueError):
        names = []
    first, second = [*names, "", ""][:2]
    return first, second


def _normalized(result: Any, is_marked: bool) -> AppliedRule:
    if isinstance(result, tuple) and len(result) == 3 and _are_updates(result[0]):
        grad_updates, param_updates, grad_shared = result
        is_list = isinstance(grad_shared, (list, tuple))
        return AppliedRule(
            param_updates, grad_updates, list(grad_shared) if is_list else [grad_shared], is_marked
        )
    return AppliedRule(result, [], [], is_marked)


def _are_updates(value: Any) -> bool:
    """Whether this is a collection of updates, and not one update itself."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, (list, tuple)) and not (value and isinstance(value[0], Variable))
