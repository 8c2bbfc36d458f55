"""The wire format `TopK`: every leader sends the largest numbers of its share to all others.

All leaders add up the numbers that they have received, in the same order. Each leader keeps the numbers
that it has not sent.

The exact `k` largest of many numbers are found without sorting all of them: a sample estimates how large
they are, one comparison per number finds the candidates, and only the candidates are ordered.
"""

from __future__ import annotations

import math

import numpy as np

from synkhronos.comms.wires import Wire, WireReduction

_SAMPLE = 1 << 14
_BLOCK = 1 << 16  # numbers; an index inside a block takes two bytes


class SparseWire(Wire):
    """The largest numbers, and an array of the numbers that were not sent."""

    def all_reduce(self, wires: WireReduction, array: np.ndarray, scale: float, are_alike: bool) -> None:
        rest = self.state()[0]
        if scale:
            if scale != 1:
                array *= np.float32(scale)
            rest += array
        count = math.ceil(self.format.fraction * array.size)
        shape = wires.size, nbytes_of(count, array.size)
        data = wires.leaders.memory(math.prod(shape), np.dtype(np.uint8)).reshape(shape)
        group, others = wires.group, [rank for rank in range(wires.size) if rank != wires.rank]
        receipts = [group.receive_array(other, data[other]) for other in others]
        indices = largest(rest, count)
        pack(indices, rest[indices], array.size, data[wires.rank])
        sent = [group.send_array(other, data[wires.rank]) for other in others]
        rest[indices] = 0
        array[:] = 0
        group.complete(receipts, sent)
        for item in data:
            indices, values = unpack(item, count, array.size)
            array[indices] += values


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the `count` numbers with the largest absolute values, in their order.

    Of equal numbers, the first are taken. NaN is larger than all numbers.

    Parameters
    ----------
    values : numpy.ndarray of float32
        1-d, C-contiguous.
    count : int
        From 1 to the length of `values`.
    """
    candidates, sizes = _at_least(values, _lower_bound(values, count))
    if candidates.size < count:
        candidates, sizes = _at_least(values, np.uint32(0))
    last = np.partition(sizes, sizes.size - count)[sizes.size - count]
    chosen = sizes > last
    ties = np.flatnonzero(sizes == last)[: count - np.count_nonzero(chosen)]
    chosen[ties] = True
    found: np.ndarray = candidates[chosen]
    return found


def _sizes(values: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return integers in the order of the absolute values."""
    return np.bitwise_and(values.view(np.uint32), np.uint32(0x7FFFFFFF), out=out)


def _lower_bound(values: np.ndarray, count: int) -> np.uint32:
    """Return a size that is probably slightly below the sizes of the `count` largest numbers."""
    sample = _sizes(values[:: max(values.size // _SAMPLE, 1)].copy())
    wanted = sample.size * count / values.size
    rank = int(wanted + 4 * wanted**0.5 + 4)
    if rank >= sample.size:
        return np.uint32(0)
    bound: np.uint32 = np.partition(sample, sample.size - rank)[sample.size - rank]
    return bound


def _at_least(values: np.ndarray, bound: np.uint32) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the numbers whose sizes are not below a bound, and these sizes."""
    indices, sizes = [], []
    scratch = np.empty(min(values.size, _BLOCK), np.uint32)
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK]
        own = _sizes(block, scratch[: block.size])
        found = np.flatnonzero(own >= bound)
        sizes.append(own[found])
        found += start
        indices.append(found)
    return np.concatenate(indices), np.concatenate(sizes)


def nbytes_of(count: int, size: int) -> int:
    """Return the number of bytes for what `pack` writes for `count` of `size` numbers."""
    return 4 * (-(-size // _BLOCK) + count + (count + 1) // 2)  # the next data are aligned as well


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


def _split(data: np.ndarray, count: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    blocks = 4 * -(-size // _BLOCK)
    numbers = blocks + 4 * count
    return (
        data[:blocks].view(np.uint32),
        data[blocks:numbers].view(np.float32),
        data[numbers : numbers + 2 * count].view(np.uint16),
    )
