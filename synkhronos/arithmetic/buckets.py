"""The parts of a vector that are reduced one after the other: the buckets of a gradient.

A gradient consists of one array for each parameter. They are computed from the last parameter to the
first, so that is the order of the buckets. A bucket holds whole arrays, as many as fill it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Sequence

#: The least and the most bytes at which a bucket is full: few enough that the first is soon full,
#: and that little is left to send after the last gradient; enough that the meeting of the machines for
#: each costs little.
SMALLEST, LARGEST = 1 << 18, 4 << 20
_MOST = 16  # buckets of a vector whose buckets are smaller than the largest


class Buckets(NamedTuple):
    """How a vector is divided, and how it is reduced.

    Attributes
    ----------
    number : int
        Identifies the vector among the vectors of a process.
    op : str
        The operation of the reduction.
    wire : Format or None
        The format in which the buckets are sent between machines.
    dtype : str
        The dtype of the vector.
    shapes : tuple of tuple of tuple of int
        For each bucket, the shapes of its arrays, in the order of the vector.
    """

    number: int
    op: str
    wire: Any
    dtype: str
    shapes: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def size(self) -> int:
        """The length of the vector."""
        return sum(self.sizes())

    def sizes(self) -> list[int]:
        """Return the length of each bucket."""
        return [_size(shapes) for shapes in self.shapes]

    def slices(self) -> list[slice]:
        """Return where each bucket is in the vector; the first bucket is at the end."""
        stop, found = self.size, []
        for shapes in self.shapes:
            found.append(slice(stop - _size(shapes), stop))
            stop -= _size(shapes)
        return found


def divide(shapes: Sequence[Sequence[int]], itemsize: int) -> list[range]:
    """Return the numbers of the arrays in each bucket, from the last array to the first.

    Parameters
    ----------
    shapes : list of tuple of int
        The shapes of the arrays of a vector.
    itemsize : int
        The bytes of a number.
    """
    nbytes = min(max(_size(shapes) * itemsize // _MOST, SMALLEST), LARGEST)
    found, stop, filled = [], len(shapes), 0
    for number in reversed(range(len(shapes))):
        filled += math.prod(shapes[number]) * itemsize
        if filled >= nbytes or number == 0:
            found.append(range(number, stop))
            stop, filled = number, 0
    return found


def _size(shapes: Sequence[Sequence[int]]) -> int:
    return sum(map(math.prod, shapes))
