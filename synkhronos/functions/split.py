"""How the rows of a call are split over the ranks."""

from __future__ import annotations

from typing import NamedTuple


class Split(NamedTuple):
    """How an argument is split over the ranks.

    Attributes
    ----------
    axis : int
    minibatch : bool
        Whether the argument holds the rows of this batch only.
    """

    axis: int
    minibatch: bool


class Most(NamedTuple):
    """A limit for rows of which only the ranks know how many there are: in a window, and sliceable ones.

    Attributes
    ----------
    together, by_rank : int or None
    """

    together: int | None = None
    by_rank: int | None = None


NO_LIMIT = Most()
