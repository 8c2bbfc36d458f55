"""All-reduces between the leaders of machines in wire formats, which send fewer bytes.

A leader's *share* of a reduction is its array, times its weight in an average. Each format is a class
with the algorithm, whose object belongs to one array of one leader and holds the state of this leader:
the shares that it has not sent (error feedback), in units of the result. All sums are in float32. Each
number of a result is either computed once and sent, or computed by all leaders with operations whose
results IEEE 754 fixes bit by bit. So all leaders have the same result.

Before an all-reduce, the leaders meet and compare their arrays, and how often they have reduced them. If
one of them has lost its state because a collective failed, all of them start afresh.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Sequence

import numpy as np

from synkhronos.arithmetic.operations import find_operation, normalized
from synkhronos.comms.base import ArraySpec, Communicator
from synkhronos.comms.linked import LinkedCommunicator, changeable

#: Arrays of at most this many bytes are sent as they are; they fit in one message in any case.
SMALL = 1 << 16

_NOTHING = np.empty(0, np.float32)


class Wire(ABC):
    """A format for one array, and the state that this leader keeps for it.

    Attributes
    ----------
    format : Format
        The format.
    count : int
        How often the array was reduced since this leader last had no state.
    """

    keeps_rest = True  # whether it has error feedback: an array of what was not sent

    def __init__(self, format: Any) -> None:
        self.format, self._size = format, -1
        self.reset()

    def check(self, size: int) -> None:  # noqa: B027
        """Raise if an array of this size cannot be sent in the format."""

    def prepare(self, size: int) -> None:
        """Start afresh if the size of the array has changed."""
        if size != self._size:
            self._size = size
            self.reset()

    def reset(self) -> None:
        """Forget the state."""
        self.count = 0
        self._rest: np.ndarray | None = None

    def state(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the vectors of the state, which are zero or new if there was no state.

        The first has the shares that it has not sent. The second is the same on all leaders. Both are
        empty if the format keeps nothing. Call `prepare` first.
        """
        if self._rest is None:
            self._rest = np.zeros(self._size if self.keeps_rest else 0, np.float32)
        return self._rest, _NOTHING

    def signature(self) -> bytes:
        """Return bytes that all leaders compare: the algorithm may depend on whether they differ."""
        return b""

    @abstractmethod
    def all_reduce(self, wires: WireReduction, array: np.ndarray, scale: float, are_alike: bool) -> None:
        """Reduce a flat array of float32 in place.

        Parameters
        ----------
        wires : WireReduction
            The leaders.
        array : numpy.ndarray
            This leader's array.
        scale : float
            The factor of this leader's array in the sum. If it is 0, the contents of the array are
            ignored.
        are_alike : bool
            Whether the `signature` of all leaders is the same.
        """


class WireReduction:
    """All-reduces in wire formats, between leaders.

    Parameters
    ----------
    leaders : LinkedCommunicator
        The communicator of the leaders.
    """

    def __init__(self, leaders: LinkedCommunicator) -> None:
        self.leaders, self.group = leaders, leaders.group
        self.rank, self.size = leaders.rank, leaders.size

    def all_reduce(
        self, arrays: Sequence[np.ndarray], op: str, weight: float, wires: Sequence[Wire]
    ) -> list[np.ndarray]:
        """Return the reductions; see `Communicator.all_reduce`."""
        contents = [changeable(array) for array in arrays]
        is_large = [array.nbytes > SMALL for array in contents]
        used = [wire for wire, large in zip(wires, is_large) if large]
        large = [array.reshape(-1) for array, is_one in zip(contents, is_large) if is_one]
        for wire, array in zip(used, large):
            wire.prepare(array.size)
        weights, are_alike = self._meet(contents, op, weight, used)
        scale = 1.0
        if find_operation(op).weighted:
            weights = normalized(weights)
            scale = weights[self.rank] / sum(weights)
        small = [array for array, is_one in zip(contents, is_large) if not is_one]
        exact = iter(self.leaders.all_reduce(small, op, weight) if small else [])
        for wire, array, alike in zip(used, large, are_alike):
            try:
                wire.all_reduce(self, array, scale, alike)
            except BaseException:
                wire.reset()
                raise
            wire.count += 1
        return [array if is_one else next(exact) for array, is_one in zip(contents, is_large)]

    def _meet(
        self, arrays: Sequence[np.ndarray], op: str, weight: float, wires: Sequence[Wire]
    ) -> tuple[Sequence[float], list[bool]]:
        """Return the weights of all leaders, and whether they have the same signature, by wire."""
        types = [ArraySpec(array.shape, array.dtype) for array in arrays]
        kept = [(repr(wire.format), wire.count, wire.signature()) for wire in wires]
        met = [pickle.loads(item) for item in self.group.exchange(pickle.dumps((weight, types, kept)))]
        weights, by_rank, kept_by_rank = zip(*met)
        Communicator.check_reducible(op, by_rank, weights)
        for wire, each in zip(wires, zip(*kept_by_rank)):
            if len({item for item, _, _ in each}) > 1:
                raise ValueError(f"wire: expected one format, got {[item for item, _, _ in each]}")
            if len({count for _, count, _ in each}) > 1:
                wire.reset()
        return weights, [len({item for _, _, item in each}) == 1 for each in zip(*kept_by_rank)]


# The state of a leader's wires, as vectors that can be stored and restored


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
