"""Which ranks each machine has."""

from __future__ import annotations

import itertools
from typing import Sequence

from synkhronos._typing import T


def ranks_of_machines(sizes: Sequence[int], master_rank: int = 0) -> list[range]:
    """Return the ranks of each machine, so that machine 0 has the master.

    The machines have consecutive ranks in their order, except for machine 0, which comes as early as
    possible such that its ranks include `master_rank`.

    Parameters
    ----------
    sizes : list of int
        The number of ranks on each machine.
    master_rank : int
        The rank of the master.

    Raises
    ------
    ValueError
        If machine 0 cannot have this rank.
    """
    first, *others = sizes
    for place in range(len(sizes)):
        order = [*others[:place], first, *others[place:]]
        ranges = [range(end - size, end) for size, end in zip(order, itertools.accumulate(order))]
        if master_rank in ranges[place]:
            return [ranges.pop(place), *ranges]
    raise ValueError(
        f"master_rank: expected a rank that the first machine can have if each machine has consecutive "
        f"ranks, got {master_rank}; the machines have {list(sizes)} ranks"
    )


def fewer_on_machines(items: Sequence[list[T]], size: int) -> list[list[T]]:
    """Return the lists, with the last items of the longest lists removed until `size` items are left."""
    items = [list(item) for item in items]
    while sum(map(len, items)) > size:
        max(reversed(items), key=len).pop()
    return items


def nearest_master(sizes: Sequence[int], master_rank: int) -> int:
    """Return the largest rank up to `master_rank` that machine 0 can have: see `ranks_of_machines`."""
    first, *others = sizes
    starts = [0, *itertools.accumulate(others)]
    possible = [rank for start in starts for rank in range(start, start + first)]
    return max(rank for rank in possible if rank <= master_rank)
