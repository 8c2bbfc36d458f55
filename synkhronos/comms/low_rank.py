"""The wire format `PowerSGD`: the two factors of each matrix are all-reduced instead of the matrix.

Vectors, and matrices that would not benefit enough, are sent in float32 with the first factors.
"""

from __future__ import annotations

import math
from typing import Any, Sequence

import numpy as np

from synkhronos.arithmetic.low_rank import (
    add_and_multiply,
    finish,
    first_factor,
    orthonormalize,
    signature,
    transposed_times,
)
from synkhronos.comms.wires import Wire, WireReduction


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
        self.count = 0
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
