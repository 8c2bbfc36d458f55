"""The state of a leader's wires, as vectors that can be stored and restored."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np

from synkhronos.comms.wires import Wire


class Kept(NamedTuple):
    """The state of some wires of one leader.

    Attributes
    ----------
    counts : list of int
        For each wire, how often it has reduced its array. With 0 it has kept nothing.
    rest : numpy.ndarray
        The shares that the leader has not sent, for the wires with other counts, one after the other.
        If it is empty, they are zeros.
    factors : numpy.ndarray
        State that is the same on all leaders.
    """

    counts: list[int]
    rest: np.ndarray
    factors: np.ndarray


def kept_by(wires: Sequence[Wire]) -> Kept:
    """Return the state of some wires of a leader. It may share their memory."""
    states = [wire.state() for wire in wires if wire.count]
    rest, factors = (_joined([state[which] for state in states]) for which in range(2))
    return Kept([wire.count for wire in wires], rest, factors)


def _joined(vectors: Sequence[np.ndarray]) -> np.ndarray:
    return vectors[0] if len(vectors) == 1 else np.concatenate([np.empty(0, np.float32), *vectors])


def restore(wires: Sequence[Wire], sizes: Sequence[int], kept: Kept) -> None:
    """Restore the state that `kept_by` has returned.

    Parameters
    ----------
    wires : list of Wire
        New wires of the same formats.
    sizes : list of int
        The sizes of their arrays.
    kept : Kept
        Their state.
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
    """Return the lengths of `rest` and `factors` for new wires that get these counts.

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
