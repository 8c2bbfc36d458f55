"""The ranks of each machine, a tree along which they start, and times by other machines' clocks.

Along the tree of numbered members, a command spreads from member 0. It is a k-nomial tree: in the number
system with the base `radix`, the parent of a member has its number with the last digit that is not 0
replaced by 0. So the members of a subtree have consecutive numbers.

The clock of another machine is read by a message there and back, a *ping*. The other machine reads its
clock between the moments at which this machine sends the message and gets the answer. The best guess is
the middle of the two, which is wrong by at most half of the time between them. So of several pings, the
shortest is used (F. Cristian 1989: Probabilistic clock synchronization, Distributed Computing 3; the
clock filter of NTP, RFC 5905, section 10, does the same). Between two such readings, the difference of
the clocks is taken to change evenly, as clocks run at speeds that are a little different.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple, Sequence

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


# Trees


def parent(member: int, radix: int) -> int:
    """Return the parent of a member other than 0."""
    return member - member % (radix * _span(member, radix))


def subtree(member: int, size: int, radix: int) -> range:
    """Return a member of `size` and all below it."""
    end = size if member == 0 else min(size, member + _span(member, radix))
    return range(member, end)


def children(member: int, size: int, radix: int) -> list[int]:
    """Return the children of a member of `size`: those first that have most below them."""
    found, span, below = [], 1, subtree(member, size, radix)
    while span < len(below):
        found += [index for index in range(member + span, member + radix * span, span) if index in below]
        span *= radix
    return sorted(found, key=lambda child: -len(subtree(child, size, radix)))


def _span(member: int, radix: int) -> int:
    """Return the value of the last digit that is not 0."""
    span = 1
    while member % (radix * span) == 0:
        span *= radix
    return span


# Clocks


class Ping(NamedTuple):
    """A message to another machine and back. Times are in seconds.

    Attributes
    ----------
    sent, received : float
        When this machine sent the message, and when it got the answer, by its own clock.
    other : float
        When the other machine answered, by its clock.
    """

    sent: float
    other: float
    received: float


class Reading(NamedTuple):
    """The times of two machines' clocks at the same moment, in seconds.

    Attributes
    ----------
    own, other : float
        The times by the clock of this machine and of the other machine.
    error : float
        The largest possible error of `own`.
    """

    own: float
    other: float
    error: float


def read_clock(pings: Sequence[Ping]) -> Reading:
    """Return the reading of the shortest of some pings."""
    sent, other, received = min(pings, key=lambda ping: ping.received - ping.sent)
    return Reading((sent + received) / 2, other, (received - sent) / 2)


def to_own(begin: Reading, end: Reading, other: float) -> float:
    """Convert a time by another machine's clock, from two readings of this clock.

    Between the readings, the result is wrong by at most the larger of their errors, if both clocks run
    evenly.
    """
    span = end.other - begin.other
    shift, last = begin.own - begin.other, end.own - end.other
    share = (other - begin.other) / span if span > 0 else 0.0
    return other + shift + share * (last - shift)
