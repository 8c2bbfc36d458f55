"""Times by another machine's clock as times by the own clock.

The clock of another machine is read by a message there and back, a *ping*. The other machine reads its
clock between the moments at which this machine sends the message and gets the answer. The best guess is
the middle of the two, which is wrong by at most half of the time between them. So of several pings, the
shortest is used (F. Cristian 1989: Probabilistic clock synchronization, Distributed Computing 3; the
clock filter of NTP, RFC 5905, section 10, does the same). Between two such readings, the difference of
the clocks is taken to change evenly, as clocks run at speeds that are a little different.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence


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
