"""Reductions in pairs of ranks: the bits of a result depend on the number of ranks only.

The ranks form a binary tree. If their number is not a power of two, the first ranks are folded: ranks 0
and 1 form a pair, then ranks 2 and 3, until the pairs and the other ranks together are a power of two.
Then neighbours are combined, then neighbouring pairs of these, and so on.

A sum of the operands of an average is scaled, so that it cannot overflow: each operand is multiplied by
its weight times a power of two, and the sum is divided in the end. A multiplication by a power of two
has no rounding error, except for numbers that become subnormal.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from synkhronos.arithmetic.operations import Operation, raising_overflow, scaled, wide_dtype


class PairwiseReduction:
    """The arithmetic of a reduction in pairs.

    Parameters
    ----------
    operation : Operation
        The operation.
    weights : list of float
        The weight of each rank. In an average, arrays of weight zero are ignored.
    """

    def __init__(self, operation: Operation, weights: Sequence[float]) -> None:
        self.operation, self.weights, self.size = operation, weights, len(weights)
        self.active = [bool(weight) or not operation.weighted for weight in weights]
        self._factors, self._divisor = [1.0] * self.size, 1.0
        if operation.weighted and self.size > 2:
            active = [weight for weight in weights if weight]
            factors, divisor = scaled(active)
            # The sum of the factors is at most 1/2, so rounding cannot make the sum overflow either.
            halves = iter([factor / 2 for factor in factors])
            self._factors = [next(halves) if weight else 0.0 for weight in weights]
            self._divisor = divisor / 2

    def reduce(self, out: np.ndarray, arrays: Sequence[np.ndarray | None]) -> None:
        """Reduce flat arrays, by rank, into `out`, which may be one of them.

        Arrays that are ignored may be None. The others are not changed. There is only one order of one
        or two arrays, so `Operation.reduce_in_pieces` reduces them.
        """
        if self.size <= 2:
            used = [(a, w) for a, w, is_active in zip(arrays, self.weights, self.active) if is_active]
            self.operation.reduce_in_pieces(out, *zip(*used))
            return
        itemsize = wide_dtype(out.dtype).itemsize if self.operation.weighted else out.itemsize
        for piece in self.operation.pieces(0, out.size, itemsize):
            parts = [None if array is None else array[piece] for array in arrays]
            self._finish(self._combine(parts, range(self.size)), out[piece])

    def _combine(self, arrays: Sequence[np.ndarray | None], ranks: range) -> Any:
        """Return the combination of the arrays of consecutive ranks; None if all of them are ignored."""
        count = len(ranks)
        if count == 1:
            return self._term(arrays[ranks[0]], ranks[0]) if self.active[ranks[0]] else None
        half = 1 << (count.bit_length() - 2)
        middle = half + min(count - 2 * half, half)
        low, high = self._combine(arrays, ranks[:middle]), self._combine(arrays, ranks[middle:])
        if low is None or high is None:
            return high if low is None else low
        return self.operation.combine(low, high, out=low if self.operation.weighted else None)

    def _term(self, array: Any, rank: int) -> np.ndarray:
        """Return an array as an operand: in an average, a new array, multiplied by its factor."""
        if not self.operation.weighted:
            return array
        term = np.empty(array.shape, wide_dtype(array.dtype))
        parts = _parts(term)
        factor = parts.dtype.type(self._factors[rank])
        np.multiply(_parts(array), factor, out=parts, dtype=parts.dtype)
        return term

    def _finish(self, total: np.ndarray, out: np.ndarray) -> None:
        """Set `out` to the result, given the combination of all arrays."""
        if not self.operation.weighted:
            out[...] = total
            return
        parts, result = _parts(total), _parts(out)
        divisor = parts.dtype.type(self._divisor)
        with raising_overflow():
            try:
                result[...] = parts / divisor
            except FloatingPointError:
                result[...] = _finite_quotient(parts, divisor, result.dtype)


def _parts(array: np.ndarray) -> np.ndarray:
    """Return the real and imaginary parts of complex numbers as one array of floats."""
    return array.view(np.finfo(array.dtype).dtype) if array.dtype.kind == "c" else array


def _finite_quotient(total: np.ndarray, divisor: Any, dtype: np.dtype) -> np.ndarray:
    """Return ``total / divisor``, in which finite numbers are finite: only rounding made others."""
    limit = np.finfo(dtype).max
    with np.errstate(over="ignore"):
        quotient: np.ndarray = total / divisor
    finite = np.isfinite(total)
    quotient[finite] = np.clip(quotient[finite], -limit, limit)
    return quotient
