r"""The steps of PowerSGD [1]_ on one matrix: its best low-rank approximation, by power iteration.

With :math:`M` the sum of the matrices :math:`M_i` of several leaders, and :math:`Q` the right factor of
the previous step:

.. math:: P = \sum_i M_i Q, \qquad \hat P = \operatorname{orthonormalize}(P), \qquad
          Q = \sum_i M_i^T \hat P, \qquad M \approx \hat P Q^T

Each leader computes the two sums from the terms that it has received, and the rest from these sums. So
the rest must be bit-identical on different processors: `orthonormalize` and `product` use only scalar
additions, multiplications, divisions and square roots, in a fixed order. The terms of the sums, which
`add_and_multiply` and `transposed_times` compute, may use BLAS.

.. [1] Vogels, T., Karimireddy, S. P., & Jaggi, M. (2019): PowerSGD: Practical low-rank gradient
       compression for distributed optimization. arXiv:1905.13727.
"""

from __future__ import annotations

import hashlib
from typing import Sequence

import numpy as np

_BLOCK = 1 << 16  # numbers: rows that fit in the cache


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
