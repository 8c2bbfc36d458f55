"""Checks which shared variables of a function a copy of it replaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Sequence

from synkhronos._typing import SharedVariable, Variable


def check_swap(
    swap: Any,
    function: str,
    own: Sequence[SharedVariable],
    names: str,
    is_shared: Callable[[Variable], bool],
) -> dict[SharedVariable, SharedVariable]:
    """Return the argument `swap` of a copy of a function as a dict, or raise an error.

    Parameters
    ----------
    swap : object
        The argument that the script has given, or None.
    function : str
        The name of the function in messages.
    own : list of shared variables
        The shared variables that the function uses.
    names : str
        The names of these variables in messages.
    is_shared : callable
        Whether a variable is a shared variable.
    """
    if swap is None:
        return {}
    if not isinstance(swap, Mapping):
        raise TypeError(f"copy: swap: expected a dict of shared variables, got {swap!r}")
    for old, new in swap.items():
        if not is_shared(old) or not is_shared(new):
            raise TypeError(f"copy: swap: expected shared variables, got {old!r} and {new!r}")
        if old not in own:
            raise ValueError(
                f"copy: swap: {function} does not use the shared variable {old}; it uses "
                f"{names or 'none'}"
            )
        if old.type != new.type:
            raise TypeError(
                f"copy: swap: expected a variable of the type of {old}, {old.type}, got {new}, which is "
                f"{new.type}"
            )
    news = [swap.get(handle, handle) for handle in own]
    if len(set(news)) < len(news):
        raise ValueError(f"copy: swap: two shared variables of {function} would be the same one")
    return dict(swap)
