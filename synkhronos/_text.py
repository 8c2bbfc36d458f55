"""Names and values in messages, which are kept short."""

from __future__ import annotations

from collections import Counter
from typing import Iterable, Mapping

from synkhronos.host import compiler

_MOST_NAMES = 5
_MOST_CHARACTERS = 200


def listed(names: Iterable[object], separator: str = ", ") -> str:
    """Return the first of several names. Equal names, such as of unnamed variables, are counted."""
    counts = Counter(str(name) for name in names)
    shown = [
        _cut(name) if count == 1 else f"{_cut(name)} ({count} times)"
        for name, count in [*counts.items()][:_MOST_NAMES]
    ]
    more = sum([*counts.values()][_MOST_NAMES:])
    return separator.join(shown) + (f" and {more} more" if more else "")


def shortened(value: object) -> str:
    """Return the representation of a value, without its middle if it is long.

    Of a variable of the graph compiler that this process does not use, also say so.
    """
    (other,) = {*compiler.NAMES} - {compiler.NAME}
    each = value if isinstance(value, (list, tuple)) else [value]
    if not any(kind.__module__.startswith(f"{other}.") for item in each for kind in type(item).__mro__):
        return _cut(repr(value))
    return (
        f"{_cut(repr(value))} of {compiler.TITLES[other]}. Both compilers are installed, and this "
        f"process uses {compiler.TITLE}: set {compiler.VARIABLE}={other}, or import {other} before "
        f"synkhronos"
    )


def as_call(made: object, arguments: Mapping[str, object]) -> str:
    """Return the call that makes an object, with the arguments that are not None."""
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value is not None)
    return f"{type(made).__name__}({given})"


def _cut(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]} ... {text[-half:]}"
