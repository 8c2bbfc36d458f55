r"""The wire format `PowerSGD` [1]_: the best low-rank approximation of each matrix, by power iteration.

With :math:`M` the sum of the matrices :math:`M_i` of several leaders, and :math:`Q` the right factor of
the previous step:

.. math:: P = \sum_i M_i Q, \qquad \hat P = \operatorname{orthonormalize}(P), \qquad
          Q = \sum_i M_i^T \hat P, \qquad M \approx \hat P Q^T

The two factors of each matrix are all-reduced instead of the matrix. Vectors, and matrices that would
not benefit enough, are sent in float32 with the first factors.

Each leader computes the two sums from the terms that it has received, and the rest from these sums. So
the rest must be bit-identical on different processors: `orthonormalize` and `product` use only scalar
additions, multiplications, divisions and square roots, in a fixed order. The terms of the sums, which
`add_and_multiply` and `transposed_times` compute, may use BLAS.

.. [1] Vogels, T., Karimireddy, S. P., & Jaggi, M. (2019): PowerSGD: Practical low-rank gradient
       compression for distributed optimization. arXiv:1905.13727.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Sequence

import numpy as np

from synkhronos.comms.wires import Wire, WireReduction

_BLOCK = 1 << 16  # numbers: rows that fit in the cache


class LowRankWire(Wire):
    """Products of narrow matrices.

    It keeps the errors of the products, and the right factors.

    Parameters
    ----------
    format : PowerSGD
        The format.
    shapes : list of tuple of int
        The shapes of the arrays that the array holds.
    """

    def __init__(self, format: Any, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__(format)
        self._shapes = shapes

    def check(self, size: int) -> None:
        check_shapes(self._shapes, size)

    def reset(self) -> None:
        super().reset()
        self._signature: bytes | None = None  # there is no state

    def state(self) -> tuple[np.ndarray, np.ndarray]:
        self._start()
        return self._rests.all, self._factors.all

    def signature(self) -> bytes:
        return self._start()

    def _start(self) -> bytes:
        """Create the kept state, if there is none."""
        if self._signature is not None:
            return self._signature
        rank, start = self.format.rank, 0
        matrices, self._exact = [], []
        for shape in self._shapes:
            stop = start + math.prod(shape)
            rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
            if rank * (rows + columns) * self.format.min_saving < rows * columns:
                matrices.append((slice(start, stop), (rows, columns)))
            elif stop > start:
                self._exact.append(slice(start, stop))
            start = stop
        shapes = [shape for _, shape in matrices]
        self._rests, self._factors, self._rights = (
            _Joined(each) for each in (shapes, *2 * [[(rank, columns) for _, columns in shapes]])
        )
        kept = zip(matrices, self._rests.each, self._factors.each)
        self._matrices = [_Matrix(*item, rest, right) for item, rest, right in kept]
        self._lefts = _Joined(
            [(rank, rows) for rows, _ in shapes] + [(item.stop - item.start,) for item in self._exact]
        )
        # Matrices with equal numbers of rows. Their left factors are orthonormalized together: they are
        # so small that the number of NumPy calls matters.
        self._by_height = [
            [number for number, (rows, _) in enumerate(shapes) if rows == common]
            for common in sorted({rows for rows, _ in shapes})
        ]
        self._own = np.empty_like(self._rights.all)
        self._signature = signature(shapes, rank)
        return self._signature

    def all_reduce(self, wires: WireReduction, array: np.ndarray, scale: float, are_alike: bool) -> None:
        self._start()
        if self.count < self.format.exact_steps:
            array[:] = array * np.float32(scale) if scale else 0
            _add_up(wires, array)
            return
        with np.errstate(over="ignore", invalid="ignore"):  # the matrix becomes NaN
            self._all_reduce(wires, array, scale, are_alike)

    def _all_reduce(
        self, wires: WireReduction, array: np.ndarray, scale: float, are_alike: bool
    ) -> None:
        lefts, exact = self._lefts.each[: len(self._matrices)], self._lefts.each[len(self._matrices) :]
        for matrix, left in zip(self._matrices, lefts):
            add_and_multiply(matrix.of(array), scale, matrix.rest, matrix.right, left)
        for place, item in zip(self._exact, exact):
            item[:] = array[place] * np.float32(scale) if scale else 0
        _add_up(wires, self._lefts.all)
        for place, item in zip(self._exact, exact):
            array[place] = item
        is_finite = [bool(np.isfinite(left).all()) for left in lefts]
        for numbers in self._by_height:
            together = np.stack([lefts[number] for number in numbers])
            orthonormalize(together)
            for number, left in zip(numbers, together):
                lefts[number][...] = left
        for matrix, left, right, is_fine in zip(self._matrices, lefts, self._rights.each, is_finite):
            if is_fine:
                transposed_times(matrix.of(array), left, right)
            else:
                right[...] = np.nan
        self._own[:] = self._rights.all
        _add_up(wires, self._rights.all)
        own = self._rights.split(self._own)
        for matrix, left, mine, right in zip(self._matrices, lefts, own, self._rights.each):
            if np.isfinite(right).all():
                finish(matrix.of(array), left, mine, right, matrix.rest, are_alike)
                matrix.keep(right)
            else:
                array[matrix.place] = np.nan
                matrix.reset()


class _Matrix:
    """The state of a matrix: where it is in the array, the errors, and the right factor."""

    def __init__(
        self, place: slice, shape: tuple[int, int], rest: np.ndarray, right: np.ndarray
    ) -> None:
        self.place, self.shape = place, shape
        self.rest, self.right = rest, right
        self._first = first_factor(shape[1], len(right), place.start)
        self.reset()

    def reset(self) -> None:
        self.right[...], self.rest[...] = self._first, 0

    def keep(self, right: np.ndarray) -> None:
        """Let the next step begin with a factor. Rows of zeros would remain zero forever."""
        is_zero = ~right.any(axis=1)
        self.right[...] = np.where(is_zero[:, None], self._first, right)

    def of(self, array: np.ndarray) -> np.ndarray:
        return array[self.place].reshape(self.shape)


def _add_up(wires: WireReduction, vector: np.ndarray) -> None:
    """Set a vector to its sum over all leaders."""
    if vector.size:
        [total] = wires.leaders.all_reduce([vector], "sum")
        assert total is vector


class _Joined:
    """Arrays in one vector, `all`, and views of `each` of them."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self._shapes = shapes
        self.all = np.empty(sum(map(math.prod, shapes)), np.float32)
        self.each = self.split(self.all)

    def split(self, vector: np.ndarray) -> list[np.ndarray]:
        """Return views of the arrays in a vector of the same layout."""
        ends = np.cumsum([math.prod(shape) for shape in self._shapes], dtype=np.int64)[:-1]
        return [part.reshape(s) for part, s in zip(np.split(vector, ends), self._shapes)]


def check_shapes(shapes: Sequence[Sequence[int]], size: int) -> None:
    """Raise unless arrays of these shapes have `size` elements together."""
    total = sum(math.prod(shape) for shape in shapes)
    if total != size:
        raise ValueError(
            f"PowerSGD: shapes: expected shapes of {size} elements together, as the array has, got "
            f"{list(shapes)} of {total}"
        )


# The steps on one matrix


def first_factor(columns: int, rank: int, seed: int) -> np.ndarray:
    """Return the right factor of the first step, of shape ``(rank, columns)``: random numbers."""
    rng = np.random.Generator(np.random.PCG64([seed, columns, rank]))
    # Not normal numbers: their tails use the logarithm, whose last bit depends on the processor.
    return (rng.random((rank, columns)) - 0.5).astype(np.float32)


def row_blocks(rows: int, columns: int) -> list[slice]:
    """Return slices of the rows of a matrix such that each slice fits in the cache."""
    step = max(1, _BLOCK // columns)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def add_and_multiply(
    matrix: np.ndarray, scale: float, rest: np.ndarray, factor: np.ndarray, out: np.ndarray
) -> None:
    """Set `matrix` to ``scale * matrix + rest``, and `out` to ``factor @ matrix.T``, in one pass.

    A `scale` of 0 ignores the contents of `matrix`.
    """
    for rows in row_blocks(*matrix.shape):
        block = matrix[rows]
        if not scale:
            block[...] = rest[rows]
        else:
            if scale != 1:
                block *= np.float32(scale)
            block += rest[rows]
        np.matmul(factor, block.T, out=out[:, rows])


def transposed_times(matrix: np.ndarray, factor: np.ndarray, out: np.ndarray) -> None:
    """Set `out` to ``factor @ matrix``."""
    out[...] = 0
    for rows in row_blocks(*matrix.shape):
        out += np.matmul(factor[:, rows], matrix[rows])


def orthonormalize(factors: np.ndarray) -> None:
    """Make the rows of matrices orthonormal, in place; rows that depend on earlier rows become 0.

    Gram-Schmidt's method, twice for each row, in double precision.

    Parameters
    ----------
    factors : numpy.ndarray
        A matrix, or several matrices of one shape, on the last two axes.
    """
    wide = factors.astype(np.float64)
    for row in range(wide.shape[-2]):
        one = wide[..., row, :]
        before = _total(one * one)
        for _ in range(2 if row else 0):
            shares = _total(wide[..., :row, :] * one[..., None, :])
            for other in range(row):
                one -= shares[..., other, None] * wide[..., other, :]
        length = _total(one * one)
        # In single precision, the remainder of a dependent row is noise.
        is_independent = length > 1e-12 * before
        one /= np.sqrt(np.where(is_independent, length, 1))[..., None]
        one[~is_independent] = 0
    factors[...] = wide


def _total(values: np.ndarray) -> np.ndarray:
    """Return the sum over the last axis, by halves, in an order that is the same on all processors."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        odd = values[..., 2 * half :]
        values = values[..., :half] + values[..., half : 2 * half]
        if odd.shape[-1]:
            values[..., :1] += odd
    return values[..., 0] if values.shape[-1] else np.zeros(values.shape[:-1])


def finish(
    matrix: np.ndarray,
    left: np.ndarray,
    own: np.ndarray,
    right: np.ndarray,
    rest: np.ndarray,
    are_alike: bool,
) -> None:
    """Set `rest` to `matrix` minus its own product, and `matrix` to the product of the sum.

    Parameters
    ----------
    matrix : numpy.ndarray
        Of shape ``(rows, columns)``.
    left, own, right : numpy.ndarray
        The left factor, this leader's right factor, and the sum of all right factors: of shape ``(rank,
        rows)`` and ``(rank, columns)``.
    rest : numpy.ndarray
        Of the same shape as `matrix`.
    are_alike : bool
        Whether all leaders have the same `signature`.
    """
    blocks = row_blocks(*matrix.shape)
    scratch = np.empty((blocks[0].stop, matrix.shape[1]), np.float32)
    for rows in blocks:
        block, term = matrix[rows], scratch[: len(matrix[rows])]
        np.matmul(left[:, rows].T, own, out=term)
        np.subtract(block, term, out=rest[rows])
        if are_alike:
            np.matmul(left[:, rows].T, right, out=block)
        else:
            product(left[:, rows], right, block, term)


def product(left: np.ndarray, right: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
    """Set `out` to ``left.T @ right``, with the same bits on all processors."""
    np.multiply(left[0][:, None], right[0], out=out)
    for item, other in zip(left[1:], right[1:]):
        np.multiply(item[:, None], other, out=scratch)
        out += scratch


def signature(shapes: Sequence[tuple[int, int]], rank: int) -> bytes:
    """Return a digest of products of these shapes by BLAS.

    On processors that give the same bits here, BLAS has chosen the same routines, so that it can be used
    for `finish`, and is several times as fast as `product`.
    """
    found = hashlib.blake2b(digest_size=8)
    for rows, columns in sorted(set(shapes)):
        left, right = first_factor(rows, rank, 0), first_factor(columns, rank, 1)
        blocks = row_blocks(rows, columns)
        for block in (blocks[0], blocks[-1]):
            found.update(np.matmul(left[:, block].T, right).tobytes())
    return found.digest()
