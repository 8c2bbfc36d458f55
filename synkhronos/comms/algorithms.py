"""Which algorithm an all-reduce between machines uses, by the size of the arrays.

In the *meeting* each rank gets the arrays of all others with the digests and weights that it needs in
any case; `doubling`, `halving` and `direct` follow on the meeting. The ranks compare the times that a
model gives for them (Hockney's: a constant for a round or a message, and a time for each byte). With two
ranks these algorithms are the same for large arrays, so nothing is measured.

All algorithms give the same bits, so results do not depend on what was measured.
"""

from __future__ import annotations

import statistics
import struct
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from synkhronos.arithmetic.pairwise import core_of

if TYPE_CHECKING:
    from synkhronos.comms.base import Linked

MEETING, DOUBLING, HALVING, DIRECT = NAMES = ("meeting", "doubling", "halving", "direct")

#: The largest arrays that are part of a meeting, in bytes together
SMALL = 1 << 16

#: The largest arrays that are reduced by doubling, in bytes together: they are copied
MIDDLE = 1 << 20
_UNLIMITED = sys.maxsize
#: The number of ranks from which on there is a choice
CHOICE_FROM = 3
# While a partner in halving has no core, the link is idle; in the direct algorithm, others use it. But
# with many ranks, that has many messages under way at once.
_FEW, _PREFERRED = 16, 0.95
_SIZES = [1 << power for power in range(2, 34)]  # bytes for which the model is evaluated

# Measuring
_TURNS, _WARMING = 8, 2  # repetitions, and those that are not counted
_OTHERS = 8  # ranks to which each rank sends at once, at most
_TINY, _SHORT, _LONG = 16, 1 << 13, 1 << 18  # bytes of messages
_LEAST = 1e-7  # seconds
_PATIENCE = 5e-4  # seconds of a short message, above which no long ones are sent
_MEASURED = struct.Struct("=d")


class Costs(NamedTuple):
    """The constants of the model, in seconds.

    Attributes
    ----------
    round : float
        The time from the begin of an exchange of short messages between pairs of ranks to its end.
    message : float
        The time that each further message of a rank takes.
    byte : float
        The time of a byte.
    """

    round: float
    message: float
    byte: float


#: For ranks that have measured nothing: of an Ethernet of 25 Gbit/s
USUAL = Costs(4e-5, 2e-5, 3.5e-10)


class Limits(NamedTuple):
    """The largest arrays for which each algorithm is used, in bytes; the others are reduced directly.

    ``str()`` of it is a text for `parse`.

    Attributes
    ----------
    meeting : int
        Of all arrays together that are part of a meeting.
    doubling, halving : int
        Of a single array. Arrays that are reduced by doubling travel together.
    """

    meeting: int
    doubling: int
    halving: int

    def __str__(self) -> str:
        found: list[str] = []
        last = 0
        for name, limit in zip(NAMES, self):
            if limit == _UNLIMITED:
                return ",".join([*found, name])
            if limit > last:
                found.append(f"{name}:{limit}")
                last = limit
        return ",".join([*found, DIRECT])


#: Of two ranks
OF_PAIR = Limits(SMALL, 0, 0)


def seconds(name: str, size: int, nbytes: float, costs: Costs) -> float:
    """Return the time of an all-reduce of an array between `size` ranks by an algorithm."""
    core = core_of(size)
    meeting = (size - 1).bit_length() * costs.round
    if name == MEETING:
        return meeting + (size - 1) * nbytes * costs.byte
    folding = 2 * (costs.round + nbytes * costs.byte) if core.pairs else 0.0
    if name == DOUBLING:
        return meeting + folding + core.rounds * (costs.round + nbytes * costs.byte)
    if name == HALVING:
        sent = 2 * nbytes * (core.size - 1) / core.size
        return meeting + folding + 2 * core.rounds * costs.round + sent * costs.byte
    sent = 2 * nbytes * (size - 1) / size
    return meeting + 2 * (costs.round + (size - 2) * costs.message) + sent * costs.byte


def choose(size: int, costs: Costs = USUAL) -> Limits:
    """Return the limits with which all-reduces between `size` ranks take the least time."""
    if size < CHOICE_FROM:
        return OF_PAIR
    limits = [0] * 3
    for nbytes in _SIZES:
        times = [seconds(name, size, nbytes, costs) for name in NAMES]
        if size <= _FEW:
            times[-1] *= _PREFERRED
        best = times.index(min(times))
        for place in range(best, 3):
            limits[place] = nbytes
    if limits[2] == _SIZES[-1]:
        limits[2] = _UNLIMITED
    return Limits(min(limits[0], SMALL), min(limits[1], MIDDLE), limits[2])


def parse(text: str) -> Limits:
    """Return the limits in a text: algorithms with limits in bytes, and the algorithm for larger arrays.

    Raises
    ------
    ValueError
        If it is not such a text.

    Examples
    --------
    >>> parse("meeting:2048,doubling:65536,halving")
    Limits(meeting=2048, doubling=65536, halving=9223372036854775807)
    >>> parse("direct")
    Limits(meeting=0, doubling=0, halving=0)
    """
    found = dict.fromkeys(NAMES, 0)
    *first, last = text.replace(" ", "").split(",")
    names = [one.partition(":")[0] for one in first] + [last]
    limits = [one.partition(":")[2] for one in first]
    places = [NAMES.index(name) if name in NAMES else -1 for name in names]
    if places != sorted(set(places)) or -1 in places or not all(one.isdecimal() for one in limits):
        raise ValueError(
            f"expected algorithms in the order {', '.join(NAMES)}, with a limit in bytes for each but "
            f"the last, as in 'meeting:2048,doubling:65536,halving'; got {text!r}"
        )
    for name, limit in zip(names, [*map(int, limits), _UNLIMITED]):
        found[name] = limit
    meeting, doubling, halving = (found[name] for name in NAMES[:3])
    return Limits(meeting, max(meeting, doubling), max(meeting, doubling, halving))


# Measuring


def measure(group: Linked) -> Costs:
    """Measure the constants: a collective, which returns the same on all ranks.

    It takes about 40 rounds, and the time of 2.6 MB unless the network is slow.
    """
    count = min(group.size - 1, _OTHERS)
    round = _agreed(group, _time(group, 1, _TINY))
    message = _agreed(group, _time(group, count, _TINY))
    nbytes = _SHORT
    byte = _agreed(group, _time(group, 1, nbytes))
    if byte < _PATIENCE:
        nbytes = _LONG
        byte = _agreed(group, _time(group, 1, nbytes))
    return Costs(
        max(round, _LEAST),
        max(message - round, 0.0) / max(count - 1, 1),
        max((byte - round) / nbytes, _LEAST / _LONG),
    )


def _time(group: Linked, others: int, nbytes: int) -> float:
    """Return the time in which each rank sends a message to the next ranks, and receives as many."""
    received, own = np.zeros((others, nbytes), np.uint8), np.zeros(nbytes, np.uint8)
    times = []
    for _ in range(_WARMING + _TURNS):
        began = time.perf_counter()
        receipts = [
            group.receive_array((group.rank - one - 1) % group.size, received[one])
            for one in range(others)
        ]
        sent = [group.send_array((group.rank + one + 1) % group.size, own) for one in range(others)]
        group.complete(receipts, sent)
        times.append(time.perf_counter() - began)
    return statistics.median(times[_WARMING:])


def _agreed(group: Linked, seconds: float) -> float:
    """Return the median of the times of all ranks, the same on each."""
    return statistics.median(
        [_MEASURED.unpack(item)[0] for item in group.exchange(_MEASURED.pack(seconds))]
    )


def decide(group: Linked, text: str) -> Limits:
    """Return the limits for the ranks of a group: a collective, with the same result on all.

    Parameters
    ----------
    text : str
        The limits for `parse`, of which those of rank 0 count; empty if they are to be measured.

    Raises
    ------
    ValueError
        On all ranks, if it is no such text on rank 0.
    """
    if group.size < CHOICE_FROM:
        return OF_PAIR
    text = group.exchange(text.encode())[0].decode()
    return parse(text) if text else choose(group.size, measure(group))
