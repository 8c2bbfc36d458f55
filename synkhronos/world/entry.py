"""The entry to public functions: they take the turn."""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar

from synkhronos.world.world import current_world

_Callable = TypeVar("_Callable", bound=Callable[..., Any])


def with_call_lock(function: _Callable) -> _Callable:
    """Decorate a public function: the turn of the current world is taken for the whole call."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with current_world().call_lock:
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]  # it has the function's signature
