"""The rows of each rank and of each slice, and the buckets of a vector.

Regularly spaced rows are a ``range``, so that taking them from an array gives a view. Other rows are a
1-d ``int64`` array. Both have a length and can be sliced, and the rest of the package uses nothing else.

The buckets of a gradient are the parts of a vector that are reduced one after the other. A gradient
consists of one array for each parameter. They are computed from the last parameter to the first, so that
is the order of the buckets. A bucket holds whole arrays, as many as fill it.
"""

from __future__ import annotations

import math
import operator
import warnings
from typing import Any, NamedTuple, Sequence

import numpy as np

from synkhronos._typing import AnyArray, Batch, Rows

#: The warning of NumPy before version 2 about ragged lists, for which newer versions raise ValueError
RaggedWarning: type[Warning] = getattr(np, "exceptions", np).VisibleDeprecationWarning
#: The least and the most bytes at which a bucket is full: few enough that the first is soon full,
#: and that little is left to send after the last gradient; enough that the meeting of the machines for
#: each costs little.
SMALLEST, LARGEST = 1 << 18, 4 << 20
_MOST = 16  # buckets of a vector whose buckets are smaller than the largest


def share(n_rows: int, parts: int, index: int) -> tuple[int, int]:
    """Return ``(start, stop)`` of part `index` when `n_rows` are split as evenly as possible.

    The longer parts come first: 7 rows in 3 parts are 3, 2 and 2 rows.
    """
    quotient, remainder = divmod(n_rows, parts)
    start = index * quotient + min(index, remainder)
    return start, start + quotient + (index < remainder)


def shares(n_rows: int, parts: int) -> list[int]:
    """Return the lengths of all parts."""
    quotient, remainder = divmod(n_rows, parts)
    return [quotient + (index < remainder) for index in range(parts)]


def select(batch: Batch | None, length: int, name: str = "batch") -> Rows:
    """Return the rows that `batch` selects from data of `length` rows.

    Parameters
    ----------
    batch : None, int, slice, or 1-d array-like of int or bool
        As in NumPy's indexing of axis 0; an int `k` is equivalent to ``slice(k)``.
    length : int
        The number of rows of the data.

    Returns
    -------
    range or numpy.ndarray
        Row numbers, nonnegative and in range.

    Raises
    ------
    TypeError, IndexError
        For an index that NumPy would not accept, or rows that do not exist.
    """
    if batch is None:
        return range(length)
    if isinstance(batch, slice):
        try:
            return range(length)[batch]
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"{name}: expected a slice of integers with a nonzero step, got {batch}"
            ) from error
    if isinstance(batch, (bool, np.bool_)):
        raise TypeError(f"{name}: expected an int, a slice, a list or array of rows, got {batch}")
    if isinstance(batch, (int, np.integer)):
        return range(length)[: operator.index(batch)]
    return _select_listed(batch, length, name)


def _select_listed(batch: Batch, length: int, name: str) -> Rows:
    if isinstance(batch, (str, bytes, dict, set)):
        raise TypeError(
            f"{name}: expected an int, a slice, a list or array of rows, got {type(batch).__name__}"
        )
    if isinstance(batch, (list, tuple)) and not batch:
        return range(0)
    if isinstance(batch, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: expected an int, a slice, a list or array of rows, got a masked array; give the "
            f"rows that are not masked: batch.compressed(), or batch.filled(False) if it is boolean"
        )
    rows = batch if type(batch) is np.ndarray else _to_array(batch, name)
    if rows.ndim == 0:
        raise TypeError(f"{name}: expected an int, a slice, a list or array of rows, got {batch!r}")
    if rows.ndim != 1:
        raise TypeError(
            f"{name}: expected a 1-d list or array of rows, got {rows.ndim} dimensions of dtype "
            f"{rows.dtype}"
        )
    if rows.dtype == bool:
        if len(rows) != length:
            raise IndexError(
                f"{name}: a boolean mask needs one entry per row: expected {length}, got {len(rows)}"
            )
        return np.flatnonzero(rows)
    if rows.dtype.kind not in "iu":
        raise TypeError(f"{name}: rows must be integers or booleans, got dtype {rows.dtype}")
    if not len(rows):
        return range(0)
    low, high = int(rows.min()), int(rows.max())
    if low < -length or high >= length:
        raise IndexError(
            f"{name}: row {high if high >= length else low} is out of range for {length} rows"
        )
    rows = rows.astype(np.int64)
    if low < 0:
        rows[rows < 0] += length
    return rows


def _to_array(batch: Batch, name: str) -> AnyArray:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RaggedWarning)
            return np.asarray(batch)
    except (ValueError, RaggedWarning) as error:
        raise TypeError(f"{name}: expected a 1-d list or array of rows, got {batch!r}") from error


def as_slice(rows: range) -> slice:
    """Return a slice that is equivalent to a ``range`` of rows."""
    if len(rows) and rows.stop < 0:
        return slice(rows.start, None, rows.step)
    return slice(rows.start, rows.stop, rows.step)


def take_rows(array: AnyArray, rows: Rows, out: AnyArray | None = None) -> AnyArray:
    """Return rows of an array: a view for a ``range``, else a copy.

    Parameters
    ----------
    array : numpy.ndarray
        The rows are on axis 0.
    rows : range or numpy.ndarray
        As returned by `select`.
    out : numpy.ndarray, optional
        Memory for a copy, of shape ``(len(rows), *array.shape[1:])``; by default a new array.
    """
    if type(rows) is range:
        return array[as_slice(rows)]
    # The rows are valid; the mode "raise" would use an additional buffer.
    return np.take(array, rows, axis=0, out=out, mode="clip")


def take_along(array: AnyArray, rows: Rows, axis: int) -> AnyArray:
    """Like `take_rows`, for rows along another axis."""
    if not axis:
        return take_rows(array, rows)
    return np.moveaxis(take_rows(np.moveaxis(array, axis, 0), rows), 0, axis)


def make_slices(arrays: Sequence[Any]) -> tuple[slice, ...]:
    """Return the slice of each array in the concatenation of all arrays along axis 0.

    Parameters
    ----------
    arrays : sequence of array-likes or Data
        Each must have at least one dimension.

    Returns
    -------
    tuple of slice
        One slice of rows per array.

    Raises
    ------
    TypeError
        If `arrays` is not a sequence.
    ValueError
        If an array has no axis 0.

    Examples
    --------
    >>> make_slices([[1, 2, 3], [4, 5]])
    (slice(0, 3, None), slice(3, 5, None))
    """
    if not isinstance(arrays, (list, tuple)):
        raise TypeError(f"make_slices: expected a list of arrays, got {type(arrays).__name__}")
    slices, start = [], 0
    for position, array in enumerate(arrays):
        try:
            length = len(array)
        except TypeError as error:
            raise TypeError(f"make_slices: array {position} has no axis 0: got {array!r}") from error
        slices.append(slice(start, start + length))
        start += length
    return tuple(slices)


# Buckets


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
