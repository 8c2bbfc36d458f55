"""Copies of parallel functions: the same request, with other shared variables or without updates."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Callable, NamedTuple

from synkhronos._text import listed
from synkhronos.engines.names import SharedVariable, Variable, clone
from synkhronos.engines.swap_argument import check_swap
from synkhronos.extensions.steps.graphs import inputs_first
from synkhronos.extensions.steps.requests import Arguments


class Request(NamedTuple):
    """The arguments of ``parallel_function``."""

    arguments: Arguments
    loss: Any
    params: Any
    gradients: Any

    def listed(self) -> Request:
        """Return a request that can be read more than once, without iterators."""
        arguments = Arguments(*map(_listed, self.arguments))
        return Request(arguments, *map(_listed, self[1:]))

    @property
    def name(self) -> str | None:
        return self.arguments.function_options.get("name")

    def shareds(self) -> list[SharedVariable]:
        """Return the shared variables that the function reads or updates."""
        return [one for one in inputs_first(self._variables()) if isinstance(one, SharedVariable)]

    def _variables(self):
        found: list[Variable] = []
        _replaced(tuple(self), found.append)
        return found

    def copied(
        self,
        swap: Any,
        delete_updates: bool,
        name: str | None,
        profile: Any,
    ) -> Request:
        """Return the request of a copy."""
        made = self
        own, function = self.shareds(), self.name or "the parallel function"
        swap = check_swap(swap, function, own, listed(own), _is_shared)
        if swap:
            # As one graph, so that gradients remain recognizable in updates.
            copies = iter(clone(self._variables(), replace=swap))
            arguments, *others = _replaced(tuple(self), lambda _: next(copies))
            made = Request(Arguments(*arguments), *others)
        options = {**made.arguments.function_options, "profile": profile}
        if name is not None or self.name is not None:
            options["name"] = name if name is not None else f"{self.name} copy"
        arguments = made.arguments
        if delete_updates:
            drawn = [one for one in made.shareds() if getattr(one, "default_update", None) is not None]
            arguments = arguments._replace(updates=[(one, one) for one in drawn])  # as they are
        return made._replace(arguments=arguments._replace(function_options=options))


def _is_shared(variable: Any) -> bool:
    return isinstance(variable, SharedVariable)


def _listed(item: Any) -> Any:
    return list(item) if isinstance(item, Iterator) else item


def _replaced(item: Any, replace: Callable[[Variable], Any]) -> Any:
    """Return what a script has given, with each variable in it replaced, in an order that is fixed."""
    if isinstance(item, Variable):
        return replace(item)
    if isinstance(item, Mapping):
        return {_replaced(key, replace): _replaced(value, replace) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        made = [_replaced(one, replace) for one in item]
        return made if isinstance(item, list) else tuple(made)
    if isinstance(getattr(item, "variable", None), Variable):  # a wrapper
        made = copy.copy(item)
        made.variable = replace(item.variable)
        return made
    return item
