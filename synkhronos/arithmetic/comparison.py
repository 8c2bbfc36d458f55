"""Comparing arrays: digests, samples of the elements, differences and tolerances."""

from __future__ import annotations

import functools
import hashlib
import pickle
import zlib
from typing import AbstractSet as Set
from typing import Any, Iterable, NamedTuple

import numpy as np

from synkhronos._typing import Array, DTypeLike

#: Relative tolerances for rounding: results that are summed in another order differ by less.
TOLERANCES = {"float16": 1e-2, "float32": 1e-4, "float64": 1e-7}
_DIGESTED = 1 << 24  # bytes at a time
_REAL = {"complex64": "float32", "complex128": "float64"}


def digest(array: np.ndarray) -> bytes:
    """Return a digest of the dtype, the shape and the bytes of an array."""
    flat: Any = np.asarray(array, order="C").reshape(-1).view(np.uint8)
    made = hashlib.blake2b(f"{array.dtype.str} {array.shape}".encode(), digest_size=32)
    for start in range(0, flat.size, _DIGESTED):  # a signal handler can run in between
        made.update(flat[start : start + _DIGESTED])
    return made.digest()


def checksum(value: Any) -> float:
    """Return a checksum of the elements of an array, which is faster than a digest.

    That of another object is of its pickle; it is not a number, and so unequal, if there is none.
    """
    if isinstance(value, np.ndarray):
        flat: Any = np.ascontiguousarray(value.T if value.flags.f_contiguous else value)
        return zlib.crc32(flat)
    parts: list[pickle.PickleBuffer] = []
    try:
        total = zlib.crc32(pickle.dumps(value, 5, buffer_callback=parts.append))
    except Exception:  # any class can have methods for this
        return float("nan")
    return functools.reduce(lambda before, part: zlib.crc32(part.raw(), before), parts, total)


def sample(array: Array, limit: int) -> Array:
    """Return an evenly spaced sample of at most `limit` elements: a view with strides.

    The same elements are chosen from arrays of the same shape.
    """
    steps = [1] * array.ndim
    extents = list(array.shape)
    while np.prod(extents) > limit:
        axis = int(np.argmax(extents))
        others = np.prod(extents) // extents[axis]
        kept = max(1, min(limit // max(others, 1), extents[axis] // 2))
        steps[axis] = -(-array.shape[axis] // kept)
        extents[axis] = -(-array.shape[axis] // steps[axis])
    if max(steps, default=1) == 1:
        return array
    return array[tuple(slice(None, None, step) for step in steps)]


class Difference(NamedTuple):
    """How much two arrays differ.

    Attributes
    ----------
    absolute : float
        The largest absolute difference of two elements; infinite if an element is not finite.
    relative : float
        The same, divided by the largest absolute value in the second array.
    """

    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"by up to {self.absolute:.3g} ({self.relative:.3g} of the largest value)"


#: The difference of arrays of different shapes.
DIFFERENT_SHAPE = Difference(float("inf"), float("inf"))


def difference(one: np.ndarray, other: np.ndarray) -> Difference:
    """Return how much arrays differ. NaNs at the same place are equal; arrays of two shapes are not."""
    if one.shape != other.shape or not one.size:
        return DIFFERENT_SHAPE if one.shape != other.shape else Difference(0.0, 0.0)
    wide, others = (np.asarray(each, _wide(each.dtype)) for each in (one, other))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        same = (one == other) | (np.isnan(wide) & np.isnan(others))
        apart = np.where(same, 0, np.abs(wide - others))
        apart = np.where(np.isnan(apart), np.inf, apart)
        absolute, largest = float(apart.max()), largest_of(others)
        relative = absolute / largest if absolute and largest else np.inf if absolute else 0.0
    return Difference(absolute, float(relative))


def largest_of(array: np.ndarray) -> float:
    """Return the largest absolute value that is finite, 0 if there is none."""
    magnitudes = np.abs(np.asarray(array, _wide(array.dtype)))
    return float(np.max(magnitudes, where=np.isfinite(magnitudes), initial=0))


def agree(one: np.ndarray, other: np.ndarray, allowed: float) -> bool:
    """Whether no elements of arrays of equal shape differ by more; NaNs at the same place are equal."""
    if not allowed:
        return np.array_equal(one, other, equal_nan=True)
    return difference(one, other).absolute <= allowed


def tolerance(dtype: DTypeLike, computed_with: Iterable[DTypeLike] = ()) -> float:
    """Return the relative tolerance for rounding of a result; 0 for integers.

    Parameters
    ----------
    dtype : dtype
        The dtype of the result.
    computed_with : iterable of dtype
        The dtypes of the values from which it is computed. Single precision among them limits the
        precision of a result in double precision.
    """
    name = _REAL.get(np.dtype(dtype).name, np.dtype(dtype).name)
    if name not in TOLERANCES:
        return 0.0
    names = {_REAL.get(np.dtype(item).name, np.dtype(item).name) for item in computed_with}
    return max(TOLERANCES[name], TOLERANCES["float32"] if "float32" in names else 0.0)


class Tolerance(NamedTuple):
    """Tolerances for the result of calls.

    Attributes
    ----------
    rtol : float or None
        Relative to the largest value; None for the tolerance for rounding, as of `tolerance`.
    atol : float
        The absolute tolerance.
    dtypes : set of dtype
        The dtypes of the values from which the result is computed.
    """

    rtol: float | None
    atol: float
    dtypes: Set[np.dtype]

    def allows(self, value: np.ndarray | None, serial: np.ndarray) -> bool:
        """Whether a value agrees with the serial value; none, and one of another shape, do not."""
        if value is None or value.shape != serial.shape:
            return False
        rtol = tolerance(serial.dtype, self.dtypes) if self.rtol is None else self.rtol
        return agree(value, serial, self.atol + rtol * largest_of(serial))


def rounding(array: np.ndarray) -> float:
    """Return the difference from `array` below which another array differs by rounding alone."""
    if array.dtype.kind not in "fc":
        return 0.0
    return 16 * float(np.finfo(array.dtype).eps) * largest_of(array)


def _wide(dtype: np.dtype) -> Any:
    """Return a dtype in which differences of values of `dtype` do not overflow."""
    return np.complex128 if dtype.kind == "c" else np.float64
