"""The arguments of a parallel function, kept so that a copy can be built from them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Callable

from synkhronos._text import listed
from synkhronos.engines.analysis.graphs import inputs_first
from synkhronos.engines.base import check_swap
from synkhronos.engines.names import SharedVariable, Variable, clone

#: The arguments of ``parallel_function``, by their names.
Arguments = Mapping[str, Any]


def without_iterators(arguments: Arguments) -> Arguments:
    """Return arguments that can be read more than once."""
    return {
        name: list(value) if isinstance(value, Iterator) else value for name, value in arguments.items()
    }


def name_in(arguments: Arguments) -> str | None:
    """Return the name of the function."""
    return arguments["function_options"].get("name")


def shareds_in(arguments: Arguments) -> list[SharedVariable]:
    """Return the shared variables that the function reads or updates."""
    return [item for item in inputs_first(_variables_in(arguments)) if isinstance(item, SharedVariable)]


def copied(
    arguments: Arguments, swap: Any, delete_updates: bool, name: str | None, profile: Any
) -> Arguments:
    """Return the arguments of a copy: with other shared variables, or without updates."""
    own, former = shareds_in(arguments), name_in(arguments)
    swap = check_swap(swap, former or "the parallel function", own, listed(own), _is_shared)
    if swap:
        # As one graph, so that gradients remain recognizable in updates.
        copies = iter(clone(_variables_in(arguments), replace=swap))
        arguments = _replaced(arguments, lambda _: next(copies))
    options = {**arguments["function_options"], "profile": profile}
    if name is not None or former is not None:
        options["name"] = name if name is not None else f"{former} copy"
    changed: dict[str, Any] = {"function_options": options}
    if delete_updates:
        drawn = [
            item for item in shareds_in(arguments) if getattr(item, "default_update", None) is not None
        ]
        changed["updates"] = [(item, item) for item in drawn]  # as they are
    return {**arguments, **changed}


def _is_shared(variable: Any) -> bool:
    return isinstance(variable, SharedVariable)


def _variables_in(arguments: Arguments) -> list[Variable]:
    found: list[Variable] = []
    _replaced(arguments, found.append)
    return found


def _replaced(item: Any, replace: Callable[[Variable], Any]) -> Any:
    """Return an argument of a script with each variable in it replaced, in a fixed order."""
    if isinstance(item, Variable):
        return replace(item)
    if isinstance(item, Mapping):
        return {_replaced(key, replace): _replaced(value, replace) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        made = [_replaced(entry, replace) for entry in item]
        return made if isinstance(item, list) else tuple(made)
    if isinstance(getattr(item, "variable", None), Variable):  # a wrapper
        wrapper = copy.copy(item)
        wrapper.variable = replace(item.variable)
        return wrapper
    return item
