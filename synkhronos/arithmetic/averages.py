"""Averages of floating-point numbers, which are finite for finite numbers, although sums may overflow.

The processor has a flag for overflow, which NumPy reads after each operation anyway. Only if it is set
are the numbers at these places averaged again, divided by a power of two. Until then they must not be
overwritten, so a sum is computed in memory of its own.

Each number of an average depends on the operands at its place alone. So it has the same bits wherever it
is computed.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Iterable, Sequence

import numpy as np

#: The part of each array that is processed at a time, so that it stays in the cache.
PIECE_BYTES = 1 << 18
#: The same for averages, which need memory for the sum besides two operands.
AVERAGED_BYTES = 3 << 16

_LARGE = 2.0**100  # weights are divided by the largest if that is larger, or smaller than the reciprocal
_STEP = 2.0**-8  # divides a sum that overflows while it grows


class _Raise:
    """As ``numpy.errstate(over="raise")``, which takes ten times as long with NumPy 1."""

    def __enter__(self) -> None:
        self._former = list(np.geterrobj())
        size, flags, handler = self._former
        shift = np.SHIFT_OVERFLOW
        np.seterrobj([size, flags & ~(7 << shift) | np.ERR_RAISE << shift, handler])

    def __exit__(self, *_: object) -> None:
        np.seterrobj(self._former)


#: A context in which an overflow raises a ``FloatingPointError``
raising_overflow: Any = functools.partial(np.errstate, over="raise")
if hasattr(np, "geterrobj"):
    raising_overflow = _Raise


def pieces(start: int, stop: int, itemsize: int, nbytes: int = PIECE_BYTES) -> list[slice]:
    """Split the items from `start` to `stop` into pieces of `nbytes` bytes, which fit in the cache."""
    step = max(1, nbytes // itemsize)
    return [slice(begin, min(begin + step, stop)) for begin in range(start, stop, step)]


def are_equal(weights: Sequence[float]) -> bool:
    """Whether all weights are the same, so that none is needed."""
    return all([weight == weights[0] for weight in weights])


def normalized(weights: Sequence[float]) -> Sequence[float]:
    """Return weights whose sum neither overflows nor vanishes: the same, unless they are extreme."""
    largest = max(weights)
    if 1 / _LARGE < largest < _LARGE or not largest:
        return weights
    return [weight / largest for weight in weights]


def scaled(weights: Sequence[float]) -> tuple[list[float], float]:
    """Return factors for a sum that cannot overflow, and the number by which to divide it.

    The factors are the weights, times a power of two.
    """
    weights = [1.0] * len(weights) if are_equal(weights) else normalized(weights)
    total = sum(weights)
    scale = power_of_two_below(1 / total)
    return [weight * scale for weight in weights], total * scale


def power_of_two_below(number: float) -> float:
    """Return the largest power of two that is not larger than a positive number."""
    return 2.0 ** (math.frexp(number)[1] - 1)


def average_floats(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the average of Python floats, in double precision, weighted by numbers of rows."""
    average = sum([value * weight for value, weight in zip(values, weights) if weight]) / sum(weights)
    if average - average == 0:  # it is finite
        return average
    result: Any = np.array(average)
    active = [(np.array(value), weight) for value, weight in zip(values, weights) if weight]
    _restore(result, *zip(*active))
    return float(result)


def average(arrays: Sequence[np.ndarray], weights: Sequence[float] | None = None) -> np.ndarray:
    """Return the average of arrays of equal shape and dtype as a new array. They are not changed."""
    out = np.empty(arrays[0].shape, arrays[0].dtype)
    if weights is None or are_equal(weights):
        try:
            with raising_overflow():
                _equally(out, arrays, out)
            return out
        except FloatingPointError:
            pass
    average_each([(out, arrays, ())], weights)
    return out


def average_each(
    parts: Iterable[tuple[np.ndarray, Sequence[np.ndarray], Sequence[np.ndarray]]],
    weights: Sequence[float] | None = None,
) -> None:
    """Compute several averages.

    Parameters
    ----------
    parts : iterable of (out, arrays, copies)
        For each average: the array to set to it, which may be one of the operands; the operands, of
        equal shape and dtype; and further arrays to set to it.
    weights : list of float, optional
        A weight for each operand. Operands of weight zero are ignored.
    """
    compute: Any = _equally
    if weights is not None and not are_equal(weights):
        compute = functools.partial(_weighted, normalized(weights))
    total = np.empty(0)  # memory that is used again for the next average of the same shape
    with raising_overflow():
        for out, arrays, copies in parts:
            if total.shape != out.shape or total.dtype != wide_dtype(out.dtype):
                total = np.empty(out.shape, wide_dtype(out.dtype))
            try:
                compute(out, arrays, total)
            except FloatingPointError:
                with np.errstate(over="ignore", invalid="ignore"):
                    _average_again(compute, out, arrays, weights, total)
            for copy in copies:
                copy[...] = out


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which numbers are added up: half precision in single."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def _equally(out: np.ndarray, arrays: Sequence[np.ndarray], total: np.ndarray) -> None:
    """Set `out` to the average of arrays. `total` is memory for the sum, which may be `out`."""
    count, dtype = len(arrays), out.dtype
    if count == 1:
        if out is not arrays[0]:
            out[...] = arrays[0]
        return
    if dtype == np.float16 and total is out:
        total = np.empty(out.shape, np.float32)
    wide = total.dtype
    np.add(arrays[0], arrays[1], out=total, dtype=wide)
    for array in arrays[2:]:
        np.add(total, array, out=total)
    if wide.kind == "f" and not count & (count - 1):
        # By a power of two, a multiplication has the same bits and is faster.
        np.multiply(total, np.array(1 / count, wide), out=out)
    else:
        np.divide(total, np.array(count, wide), out=out)


def _weighted(
    weights: Sequence[float], out: np.ndarray, arrays: Sequence[np.ndarray], total: np.ndarray
) -> None:
    wide = total.dtype
    product = np.empty(total.shape, wide)
    total[...] = 0
    for array, weight in zip(arrays, weights):
        if weight:
            np.multiply(array, np.array(weight, wide), out=product, dtype=wide)
            np.add(total, product, out=total)
    np.divide(total, np.array(sum(weights), wide), out=out)


def _average_again(
    compute: Callable[..., None],
    out: np.ndarray,
    arrays: Sequence[np.ndarray],
    weights: Sequence[float] | None,
    total: np.ndarray,
) -> None:
    """Compute an average whose sum overflows at some places."""
    result = np.empty_like(out)
    compute(result, arrays, total)
    pairs = zip(arrays, weights or [1] * len(arrays))
    _restore(result, *zip(*[(array, weight) for array, weight in pairs if weight]))
    out[...] = result


def _restore(result: np.ndarray, arrays: Sequence[np.ndarray], weights: Sequence[float]) -> None:
    """Correct an average at the places at which it is not finite, although all operands are."""
    if result.dtype.kind == "c":
        for part in ("real", "imag"):
            _restore(getattr(result, part), [getattr(array, part) for array in arrays], weights)
        return
    lost = ~np.isfinite(result)
    for array in arrays:
        lost &= np.isfinite(array)
    if np.any(lost):
        result[lost] = _scaled_average([array[lost] for array in arrays], weights)


def _scaled_average(arrays: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Return the average of arrays of finite numbers of any size."""
    dtype, largest = arrays[0].dtype, max(weights)
    wide, shares = wide_dtype(dtype).type, [weight / largest for weight in weights]
    scale = power_of_two_below(0.5 / len(arrays))
    total = sum([
        np.multiply(array, wide(scale), dtype=wide) * wide(share)
        for array, share in zip(arrays, shares)
    ])  # fmt: skip
    limit = wide(np.finfo(dtype).max) * wide(scale)
    found: np.ndarray = _within(total / wide(sum(shares)), limit) / wide(scale)
    return found


class GrowingSum:
    """A sum of arrays of floating-point numbers to which arrays are added one by one.

    When it would overflow, it is divided by a power of two, and so are the arrays added later.

    Parameters
    ----------
    first : numpy.ndarray
        Its memory is used.
    """

    def __init__(self, first: np.ndarray) -> None:
        self.shape, self._sum, self._scale = first.shape, first.reshape(-1), 1.0

    def add(self, array: np.ndarray, factor: float) -> None:
        """Add the product of an array of the same shape and dtype, and a number."""
        flat = array.reshape(-1)
        with raising_overflow():
            for piece in pieces(0, flat.size, flat.itemsize, AVERAGED_BYTES):
                self._add(piece, flat[piece], factor)

    def _add(self, piece: slice, terms: np.ndarray, factor: float) -> None:
        while not self._could_add(piece, terms, factor * self._scale):
            self._sum *= terms.dtype.type(_STEP)
            self._scale *= _STEP

    def _could_add(self, piece: slice, terms: np.ndarray, factor: float) -> bool:
        try:
            if factor != 1:
                terms = terms * terms.dtype.type(factor)
            self._sum[piece] = self._sum[piece] + terms
        except FloatingPointError:
            return False
        return True

    def divided(self, divisor: float, dtype: Any) -> np.ndarray:
        """Return the quotient of the sum and a number of at least 1, in a dtype; the sum is lost."""
        quotient = self._sum
        if divisor != 1:
            quotient /= quotient.dtype.type(divisor)
        if self._scale != 1:
            parts = quotient.view(np.finfo(quotient.dtype).dtype)  # of complex numbers
            scale = parts.dtype.type(self._scale)
            finite = np.isfinite(parts)
            parts[finite] = _within(parts[finite], np.finfo(dtype).max * scale)
            parts /= scale
        return quotient.reshape(self.shape).astype(dtype, copy=False)


def _within(numbers: np.ndarray, limit: Any) -> np.ndarray:
    """Return averages within the limit, which rounding may have made larger."""
    return np.clip(numbers, -limit, limit)
