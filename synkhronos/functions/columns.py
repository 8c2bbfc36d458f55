"""How the arguments of a call are split: into whole values, or the rows that a rank or a slice uses."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from synkhronos._typing import Rows
from synkhronos.arithmetic.partition import share
from synkhronos.world.rank_state import RankState


def share_or_last(n_rows: int, size: int, index: int) -> tuple[int, int]:
    """Return the bounds of a share of the rows, or the bounds of the last row if the share is empty.

    Ranks that have to compute although they have no rows, or none in a slice, do so with this row.
    """
    start, stop = share(n_rows, size, index)
    return (start, stop) if start < stop else (max(n_rows - 1, 0), n_rows)


class Split(NamedTuple):
    """How an argument is split over the ranks.

    Attributes
    ----------
    axis : int
        The axis of the rows.
    minibatch : bool
        Whether the argument holds the rows of this batch only.
    """

    axis: int
    minibatch: bool


class RowLimit(NamedTuple):
    """A limit for rows whose number only the ranks know: rows in a window, and sliceable rows.

    Attributes
    ----------
    together, by_rank : int or None
        The largest number of rows of all ranks together, and of each rank.
    """

    together: int | None = None
    by_rank: int | None = None


NO_LIMIT = RowLimit()


class Column(NamedTuple):
    """An argument, or the part of it that this rank uses.

    Attributes
    ----------
    source : array, Handle, Composite, or any object that is used as a whole
        The whole argument.
    rows : range, numpy.ndarray or None
        The rows of this rank; None if it uses all of the source.
    axis : int
        The axis of the rows.
    key : hashable
        Identifies the buffer into which rows are copied.
    """

    source: Any
    rows: Rows | None = None
    axis: int = 0
    key: Any = None

    def of_last_row(self) -> Column:
        """Return the last row of the source, if it has any."""
        length = len(self.source)
        return self._replace(rows=range(max(length - 1, 0), length))

    def slice(self, n_slices: int, index: int) -> Column:
        """Return a slice of the rows."""
        if self.rows is None:
            return self
        start, stop = share_or_last(len(self.rows), n_slices, index)
        return self._replace(rows=self.rows[start:stop])

    def take(self, state: RankState) -> Any:
        """Return the argument of the compiled function."""
        if self.rows is None:
            return self.source
        return state.take(self.key, self.source, self.rows, self.axis)


class Bound(NamedTuple):
    """An argument that is one bound of this rank's rows: the first row, or the row after the last."""

    rows: range
    end: int

    def slice(self, n_slices: int, index: int) -> Bound:
        start, stop = share_or_last(len(self.rows), n_slices, index)
        return self._replace(rows=self.rows[start:stop])

    def take(self, state: RankState) -> np.ndarray:
        return np.array(self.rows.stop if self.end else self.rows.start)
