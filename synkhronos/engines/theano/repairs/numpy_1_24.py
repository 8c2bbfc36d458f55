"""The functions that the repairs of Theano for NumPy 1.24 and newer call; see ``table.txt``.

Python loads it as the module ``theano.compat.numpy_1_24``. It imports nothing of Theano, whose first
modules need it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

IS_2 = np.lib.NumpyVersion(np.__version__) >= "2.0.0"

_FOLDER = Path(__file__).resolve().parent
_FILES = [_FOLDER / f"{name}.h" for name in (["numpy_2"] if IS_2 else []) + ["numpy_1_24"]]
_ONCE = "#ifndef THEANO_FOR_THIS_NUMPY\n#define THEANO_FOR_THIS_NUMPY\n{}#endif\n"

#: The beginning of all C code
PREAMBLE = _ONCE.format("".join("\n" + file.read_text(encoding="utf-8") for file in _FILES))


def dtype_of(item: Any) -> np.dtype:
    """Return a dtype, from a description of it or an object that has one, such as a variable."""
    name = getattr(item, "dtype", None)
    return np.dtype(name if isinstance(name, str) else item)


def asarray(value: Any, dtype: Any, order: Literal["K", "A", "C", "F"] | None = None) -> np.ndarray:
    """Return an array of a dtype. Integers that do not fit it wrap, as they did with NumPy 1."""
    try:
        return np.asarray(value, dtype=dtype, order=order)
    except OverflowError:
        dtype, objects = np.dtype(dtype), np.asarray(value, dtype=object)
        # Up to there NumPy 1 converted numbers of Python.
        least, most = -(2**63), 2**64 if dtype in ("uint32", "uint64") else 2**63
        if dtype.kind not in "iu" or not all(
            isinstance(item, (int, np.integer)) and least <= item < most for item in objects.flat
        ):
            raise
        kept = 2 ** (8 * dtype.itemsize) - 1
        unsigned = np.array([int(item) & kept for item in objects.flat], f"u{dtype.itemsize}")
        return np.asarray(unsigned.reshape(objects.shape).view(dtype), order=order)


def number(constructor: Any, value: Any) -> Any:
    """Return a number of a type of NumPy. An integer that does not fit it wraps."""
    try:
        return constructor(value)
    except OverflowError:
        return asarray(value, constructor)[()]


def added(array: np.ndarray, increment: np.ndarray) -> Any:
    """Return an increment with which ``array += increment`` has the dtype that it had with NumPy 1.

    There, the dtype of a 0-d array did not count among arrays.
    """
    if increment.ndim:
        return increment
    if array.dtype.kind in "iu" and increment.dtype.kind in "iu":
        fits = array.dtype.kind == "u" and increment >= 0
        return increment.astype(array.dtype) if fits else increment
    return increment.item()


def arange(start: Any, stop: Any, step: Any, dtype: Any) -> np.ndarray:
    """Return a range of numbers. Numbers that do not fit the dtype wrap."""
    try:
        return np.arange(start, stop, step, dtype=dtype)
    except OverflowError:
        return np.arange(start, stop, step).astype(dtype)


def unique(array: np.ndarray, **options: Any) -> Any:
    """Do the same as `numpy.unique`, with a vector as the inverse, as up to NumPy 1."""
    found = np.unique(array, **options)
    if not options.get("return_inverse"):
        return found
    found = list(found)
    place = 1 + bool(options.get("return_index"))
    found[place] = found[place].reshape(-1)
    return found
