"""The largest numbers of an array, and the bytes in which they travel.

The exact `k` largest of many numbers, without sorting them: a sample says how large they are, one
comparison per number finds those that may be among them, and only these are ordered.
"""

from __future__ import annotations

import numpy as np

_SAMPLE = 1 << 14
_BLOCK = 1 << 16  # numbers: the place of one inside its block takes two bytes


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the `count` numbers with the largest absolute values, in their order.

    Of equal ones, the first are taken. NaN is larger than all numbers.

    Parameters
    ----------
    values : numpy.ndarray of float32
        1-d, C-contiguous.
    count : int
        From 1 to the length of `values`.
    """
    sizes = np.bitwise_and(values.view(np.uint32), np.uint32(0x7FFFFFFF))  # ordered as the numbers
    candidates = np.flatnonzero(sizes >= _lower_bound(sizes, count))
    if candidates.size < count:
        candidates = np.arange(values.size)
    own = sizes[candidates]
    last = np.partition(own, own.size - count)[own.size - count]
    chosen = own > last
    ties = np.flatnonzero(own == last)[: count - np.count_nonzero(chosen)]
    chosen[ties] = True
    return candidates[chosen]


def _lower_bound(sizes, count):
    """Return a number that is probably a little smaller than the `count` largest ones."""
    sample = sizes[:: max(sizes.size // _SAMPLE, 1)]
    wanted = sample.size * count / sizes.size
    rank = int(wanted + 4 * wanted**0.5 + 4)
    if rank >= sample.size:
        return 0
    return np.partition(sample, sample.size - rank)[sample.size - rank]


def nbytes_of(count: int, size: int) -> int:
    """Return the length of what `pack` writes for `count` of `size` numbers."""
    return 4 * -(-size // _BLOCK) + 6 * count


def pack(indices: np.ndarray, values: np.ndarray, size: int, out: np.ndarray) -> None:
    """Write increasing indices into an array of `size` numbers, and the numbers there, as bytes."""
    counts, numbers, places = _split(out, indices.size, size)
    counts[:] = np.bincount(indices >> 16, minlength=counts.size)
    numbers[:] = values
    np.copyto(places, indices & (_BLOCK - 1), casting="unsafe")


def unpack(data: np.ndarray, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices and the numbers that `pack` wrote."""
    counts, numbers, places = _split(data, count, size)
    starts = np.repeat(np.arange(0, size, _BLOCK), counts)
    return starts + places, numbers


def _split(data, count, size):
    blocks = 4 * -(-size // _BLOCK)
    numbers = blocks + 4 * count
    return (
        data[:blocks].view(np.uint32),
        data[blocks:numbers].view(np.float32),
        data[numbers:].view(np.uint16),
    )
