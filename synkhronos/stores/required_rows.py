"""Which rows of which arrays other ranks need for a command, and the rows that they have received."""

from __future__ import annotations

from typing import Any, Callable, Hashable, Iterable, NamedTuple

import numpy as np

from synkhronos._typing import Rows


class RequiredRows(NamedTuple):
    """The rows of an array that some ranks need.

    Attributes
    ----------
    handle : Handle
        The array.
    rows : range, numpy.ndarray or None
        None for the whole array.
    axis : int
        The axis of the rows.
    lasts : bool
        Whether the ranks keep the array after the command.
    """

    handle: Any
    rows: Rows | None = None
    axis: int = 0
    lasts: bool = False


#: ``needs(ranks, size)`` returns the needs of consecutive ranks, a ``range``.
Needs = Callable[[range, int], Iterable[RequiredRows]]


def combine(needs: Iterable[RequiredRows]) -> list[RequiredRows]:
    """Return one `RequiredRows` for each handle, with all rows of its needs."""
    combined: dict[Hashable, RequiredRows] = {}
    for need in needs:
        former = combined.get(need.handle)
        if former is None:
            combined[need.handle] = _with_unique_rows(need)
        elif former.rows is not None:
            combined[need.handle] = _both(former, need)
    return list(combined.values())


def _with_unique_rows(need: RequiredRows) -> RequiredRows:
    if need.rows is None or type(need.rows) is range:
        return need
    return need._replace(rows=np.unique(need.rows))


def _both(one: RequiredRows, other: RequiredRows) -> RequiredRows:
    if other.rows is None or one.axis != other.axis:
        return RequiredRows(one.handle)
    if type(one.rows) is type(other.rows) is range and one.rows == other.rows:
        return one
    # With a dtype, as an empty range would become an array of floats.
    rows = [np.asarray(need.rows, np.int64) for need in (one, other)]
    return one._replace(rows=np.union1d(*rows))


def positions(rows: Rows, among: Rows) -> Rows:
    """Return where each of `rows` is in `among`, a range or a sorted array that has all of them."""
    if type(among) is not range:
        return np.searchsorted(among, rows)
    if type(rows) is not range:
        return (rows - among.start) // among.step
    if not rows:
        return range(0)
    first = (rows[0] - among.start) // among.step
    step = rows.step // among.step
    return range(first, first + step * (len(rows) - 1) + (1 if step > 0 else -1), step)
