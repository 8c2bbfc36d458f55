"""Which rows each rank and each slice gets.

Rows are a ``range`` if they are regular, so that taking them from an array gives a view, and otherwise a
1-d ``int64`` array. Both have a length and can be sliced, which is all that the rest needs.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any, Sequence

import numpy as np

from synkhronos._typing import Batch, Rows


def share(n_rows: int, parts: int, index: int) -> tuple[int, int]:
    """Return ``(start, stop)`` of part `index` when `n_rows` are split as evenly as possible.

    The longer parts come first: 7 rows in 3 parts are 3, 2 and 2.
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
        As in NumPy's indexing of the 0-th axis; an int `k` is ``slice(k)``.
    length : int
        Rows of the data.

    Returns
    -------
    range or numpy.ndarray
        Row numbers, not negative and not out of range.

    Raises
    ------
    TypeError, IndexError
        For what NumPy would not accept as an index, or rows that do not exist.
    """
    if batch is None:
        return range(length)
    if isinstance(batch, slice):
        try:
            return range(length)[batch]
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"{name}: expected a slice of integers, the step not zero, got {batch}"
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
    rows = batch if isinstance(batch, np.ndarray) else _to_array(batch, name)
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
                f"{name}: a boolean mask needs one entry a row: expected {length}, got {len(rows)}"
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


def _to_array(batch: Batch, name: str) -> np.ndarray:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", np.VisibleDeprecationWarning)  # ragged lists
            return np.asarray(batch)
    except (ValueError, np.VisibleDeprecationWarning) as error:
        raise TypeError(f"{name}: expected a 1-d list or array of rows, got {batch!r}") from error


def as_slice(rows: range) -> slice:
    """Return the slice that takes the rows of a ``range`` from an array."""
    if len(rows) and rows.stop < 0:
        return slice(rows.start, None, rows.step)
    return slice(rows.start, rows.stop, rows.step)


def take_rows(array: np.ndarray, rows: Rows, out: np.ndarray | None = None) -> np.ndarray:
    """Return rows of an array: a view where they are a ``range``, else a copy.

    Parameters
    ----------
    array : numpy.ndarray
    rows : range or numpy.ndarray
        As `select` returns them.
    out : numpy.ndarray, optional
        Where to put the copy, of shape ``(len(rows), *array.shape[1:])``; else a new array.
    """
    if type(rows) is range:
        return array[as_slice(rows)]
    # The rows are valid; the mode "raise" would go through another buffer.
    return np.take(array, rows, axis=0, out=out, mode="clip")


def make_slices(arrays: Sequence[Any]) -> tuple[slice, ...]:
    """Return where each array is, along axis 0, in their concatenation.

    Parameters
    ----------
    arrays : sequence of array-likes or Data

    Returns
    -------
    tuple of slice

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
            raise TypeError(
                f"make_slices: array {position} has no 0-th axis: got {array!r}"
            ) from error
        slices.append(slice(start, start + length))
        start += length
    return tuple(slices)
