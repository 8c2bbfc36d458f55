"""Checks of the arguments that a script gives, below all layers.

Each check returns the argument in its plain form, and raises an error that names it otherwise: `label`
is the name of the argument, with the name of the function if several have such an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from synkhronos._text import shortened
from synkhronos._typing import DTypeLike, Shape


def is_int(value: Any) -> bool:
    """Whether a value is a whole number of Python or NumPy, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_int(value: Any, label: str, least: int | None = None, what: str = "an int") -> int:
    """Return an int, or raise. `what`, the expected kind of value, is part of the ``TypeError``.

    Raises
    ------
    TypeError
        If it is not an int.
    ValueError
        If it is less than `least`.
    """
    if not is_int(value):
        raise TypeError(f"{label}: expected {what}, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{label}: expected at least {least}, got {value}")
    return int(value)


def check_number(value: Any, label: str, what: str = "a number") -> float:
    """Return a real number as a float, or raise. `what`, the expected kind of value, is in the error."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):  # Real is slow
        raise TypeError(f"{label}: expected {what}, got {value!r}")
    return float(value)


def check_in_range(value: Any, label: str, least: float, most: float = np.inf) -> float:
    """Return a number in an interval as a float, or raise."""
    number = check_number(value, label)
    if not least <= number <= most:
        bounds = f"at least {least}" if most == np.inf else f"a number from {least} to {most}"
        raise ValueError(f"{label}: expected {bounds}, got {value!r}")
    return number


def check_flag(value: Any, label: str) -> bool:
    """Return True or False, or raise."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{label}: expected True or False, got {value!r}")
    return bool(value)


def check_string(value: Any, label: str) -> str:
    """Return a string, or raise."""
    if not isinstance(value, str):
        raise TypeError(f"{label}: expected a string, got {value!r}")
    return value


def check_choice(value: Any, label: str, choices: Iterable[str]) -> str:
    """Return one of several words, or raise."""
    if isinstance(value, str) and value in choices:
        return value
    error = ValueError if isinstance(value, str) else TypeError
    raise error(f"{label}: expected one of {sorted(choices)}, got {value!r}")


def check_list(values: Any, label: str, of: str) -> list[Any]:
    """Return a list, which is empty for None, or raise; `of` names the items in the message."""
    if values is None:
        return []
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{label}: expected a list of {of}, got {shortened(values)}")
    return list(values)


def check_pairs(values: Any, label: str, what: str) -> list[Any]:
    """Return the pairs of a dict, or of a list, or raise; `what` names a pair in the message."""
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)) or hasattr(values, "type"):
        raise TypeError(f"{label}: expected a dict or a list of pairs, got {shortened(values)}")
    pairs = list(values.items() if isinstance(values, Mapping) else values)
    for position, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{label}[{position}]: expected {what}, got {shortened(pair)}")
    return pairs


# Arrays


def check_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return a dtype in the machine's byte order, or raise if it is not a dtype of numbers."""
    try:
        checked = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype: expected a NumPy dtype, got {dtype!r}") from error
    if checked.kind not in "biufc":
        raise TypeError(f"dtype: expected a dtype of numbers, got {checked}")
    return checked.newbyteorder("=")  # compiled code supports no other


def check_extent(extent: int, label: str) -> int:
    """Return an int that is not negative, or raise."""
    extent = check_int(extent, label)
    if extent < 0:
        raise ValueError(f"{label}: expected zero or more, got {extent}")
    return extent


def check_shape(shape: Shape) -> tuple[int, ...]:
    """Return a shape as a tuple of ints, or raise."""
    if not isinstance(shape, (tuple, list)):
        raise TypeError(f"shape: expected a tuple of ints, got {shape!r}")
    return tuple(check_extent(extent, "shape") for extent in shape)


def check_oversize(oversize: float) -> float:
    """Return the argument `oversize` as a float, or raise if it is not a number in [1, 2]."""
    number = check_number(oversize, "oversize", "a number in [1, 2]")
    if not 1 <= number <= 2:
        raise ValueError(f"oversize: expected a number in [1, 2], got {oversize}")
    return number
