"""What a leader keeps for wires, as vectors that can be stored and restored."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np

from synkhronos.comms.wires import Wire


class Kept(NamedTuple):
    """What one leader keeps for some wires.

    Attributes
    ----------
    counts : list of int
        For each wire, how often it has reduced its array. With 0 it has kept nothing.
    rest : numpy.ndarray
        The shares that the leader has not sent, for the other wires, one after another. If it is empty,
        they are zeros.
    factors : numpy.ndarray
        State that is the same on all leaders.
    """

    counts: list[int]
    rest: np.ndarray
    factors: np.ndarray


def kept_by(wires: Sequence[Wire]) -> Kept:
    """Return what a leader keeps for some wires. It may share their memory."""
    states = [wire.state() for wire in wires if wire.count]
    rest, factors = (_joined([one[which] for one in states]) for which in range(2))
    return Kept([wire.count for wire in wires], rest, factors)


def _joined(vectors):
    return vectors[0] if len(vectors) == 1 else np.concatenate([np.empty(0, np.float32), *vectors])


def restore(wires: Sequence[Wire], sizes: Sequence[int], kept: Kept) -> None:
    """Let a leader keep what `kept_by` has returned.

    Parameters
    ----------
    wires : list of Wire
    sizes : list of int
        The sizes of their arrays.
    kept : Kept
    """
    starts = [0, 0]
    for wire, size, count in zip(wires, sizes, kept.counts):
        wire.prepare(size)
        wire.reset()
        for which, own in enumerate(wire.state() if count else ()):
            given = (kept.rest, kept.factors)[which]
            if given.size:
                own[...] = given[starts[which] : starts[which] + own.size]
            starts[which] += own.size
        wire.count = count


def lengths(wires: Sequence[Wire], sizes: Sequence[int], counts: Sequence[int]) -> tuple[int, int]:
    """Return how long `rest` and `factors` are for new wires, once their counts are these.

    Raises
    ------
    ValueError
        If the number of counts, or a size, is wrong.
    """
    if len(counts) != len(wires):
        raise ValueError(f"expected counts of {len(wires)} wires, got {len(counts)}")
    for wire, size in zip(wires, sizes):
        wire.check(size)
        wire.prepare(size)
    states = [wire.state() for wire, count in zip(wires, counts) if count]
    return sum(rest.size for rest, _ in states), sum(factors.size for _, factors in states)
