"""Checking the user's whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_int(value: Any, label: str, least: int | None = None) -> int:
    """Return an argument that must be an int; `label` names it in errors.

    Raises
    ------
    TypeError
        If it is not an int. A bool is none.
    ValueError
        If it is less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{label}: expected an int, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{label}: expected at least {least}, got {value}")
    return int(value)
