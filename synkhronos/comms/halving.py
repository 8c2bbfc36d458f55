"""The all-reduce by recursive halving and doubling, for arrays of any size.

A reduce-scatter by recursive halving: in each round, a rank exchanges one half of its elements for the
other half of another rank, and combines what it keeps with what it has received. Then an all-gather by
recursive doubling, in the reverse order: ``2 log2(size)`` rounds in all, and ``2 (size - 1) / size``
times the bytes of the array, which is the minimum [1]_. If the number of ranks is not a power of two,
the first rank of some pairs sends its array to the second before, and gets the result after: twice the
bytes of the array more.

Messages are sent in chunks, and a few chunks ahead of those received: a chunk is combined while the next
ones are being sent.

.. [1] Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH, 2005.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, NamedTuple, Sequence

import numpy as np

from synkhronos.arithmetic.pairwise import Operand, PairwiseReduction
from synkhronos.comms.direct import CHUNK, WINDOW, chunks

if TYPE_CHECKING:
    from synkhronos.comms.base import LinkedRanks

_STREAM = 0


class HalvingReduction:
    """The reduction of a flat array, in place.

    Parameters
    ----------
    comm : LinkedRanks
        The communicator of these ranks.
    arithmetic : PairwiseReduction
        The operation, and the ranks whose arrays are reduced.
    array : numpy.ndarray
        The flat array of this rank.
    """

    def __init__(self, comm: LinkedRanks, arithmetic: PairwiseReduction, array: np.ndarray) -> None:
        self.comm, self.group, self.rank = comm, comm.group, comm.rank
        self.arithmetic, self.array, self.core = arithmetic, array, arithmetic.core
        self.place = self.core.place(self.rank)
        self.acts_for_pair = self.core.acts_for_pair(self.rank)
        self.wide = arithmetic.dtype(array.dtype)
        self.step = max(CHUNK // self.wide.itemsize, 1)  # elements of a chunk
        length = WINDOW * min(self.step, array.size) * self.wide.itemsize
        self.window = comm.memory(length, np.dtype(np.uint8)).reshape(WINDOW, -1)
        # Combinations of halves are in single precision, for which the array has no room.
        self.partial = array if self.wide == array.dtype else np.empty(array.size, self.wide)
        self.has_partial = arithmetic.active[self.rank]

    def run(self) -> None:
        if self.core.pairs:
            self._fold()
        kept = [slice(0, self.array.size)]  # the elements whose combinations this rank has, by round
        for turn in range(self.core.rounds):
            kept.append(self._halve(turn, kept[-1]))
        if self.place is not None:
            own = kept[-1]
            self.comm.reduce_part(self.arithmetic.finish, self.partial[own], self.array[own])
        for turn in reversed(range(self.core.rounds)):
            self._double(turn, kept[turn], kept[turn + 1])
        if self.core.pairs:
            self._unfold()

    # The steps, in each of which a rank exchanges elements with at most one other rank

    def _fold(self) -> None:
        """Let the second rank of each pair act for both."""
        partner, length = self.rank ^ 1, self.array.size
        if self.place is None:
            self._transfer(partner, length, self.array if self.has_partial else None)
        elif self.acts_for_pair:
            own = _Side(self.rank, True, self.has_partial)
            other = _Side(partner, True, self.arithmetic.active[partner])
            self._transfer(partner, length, None, *self._combination(slice(0, length), own, other))
        else:
            self._transfer(partner, length)

    def _halve(self, turn: int, every: slice) -> slice:
        """Exchange one half of the elements for the other; return the half that is kept."""
        length, place = self._longest(turn), self.place
        if place is None:
            self._transfer(self.rank, length)
            return every
        middle, other_place = every.start + -(-(every.stop - every.start) // 2), place ^ (1 << turn)
        kept, given = slice(every.start, middle), slice(middle, every.stop)
        if other_place < place:
            kept, given = given, kept
        partner = self.core.rank(other_place)
        does_receive = self.arithmetic.has_active(self.core.block(other_place, 1 << turn))
        own = _Side(self.rank, self._has_given(turn, place), self.has_partial)
        other = _Side(partner, self._has_given(turn, other_place), does_receive)
        outgoing = self._source(own)[given] if own.is_active else None
        self._transfer(partner, length, outgoing, *self._combination(kept, own, other))
        return kept

    def _double(self, turn: int, every: slice, own: slice) -> None:
        """Exchange the elements of the result for the other half."""
        length = self._longest(turn)
        if self.place is None:
            self._transfer(self.rank, length)
            return
        is_first = not self.place >> turn & 1
        other = slice(own.stop, every.stop) if is_first else slice(every.start, own.start)
        partner = self.core.rank(self.place ^ (1 << turn))
        self._transfer(partner, length, self.array[own], self._chunks(self.array[other]))

    def _unfold(self) -> None:
        """Give the first rank of each pair the result."""
        partner, length = self.rank ^ 1, self.array.size
        if self.place is None:
            self._transfer(partner, length, None, self._chunks(self.array))
        else:
            self._transfer(partner, length, self.array if self.acts_for_pair else None)

    def _longest(self, turn: int) -> int:
        """Return the length of the longest half in a round."""
        return -(-self.array.size >> (turn + 1))

    def _has_given(self, turn: int, place: int) -> bool:
        """Whether the rank at a place sends its array as it was given, in a round."""
        return turn == 0 and place >= self.core.pairs

    def _source(self, own: _Side) -> np.ndarray:
        return self.array if own.is_given else self.partial

    def _combination(
        self, kept: slice, own: _Side, other: _Side
    ) -> tuple[list[np.ndarray], Callable[[int], None]]:
        """Return the memory for chunks of another rank, and a function that combines such a chunk."""
        mine, results = (self._chunks(one[kept]) for one in (self._source(own), self.partial))
        dtype = self.array.dtype if other.is_given else self.wide
        received = [
            self.window[number % WINDOW, : one.size * dtype.itemsize].view(dtype)
            for number, one in enumerate(mine)
            if other.is_active
        ]
        self.has_partial = own.is_active or other.is_active

        def combine(number: int) -> None:
            if number >= len(mine):
                return
            low = own.operand(mine[number]) if own.is_active else None
            high = other.operand(received[number]) if other.is_active else None
            if other.rank < own.rank:
                low, high = high, low
            self.comm.reduce_part(self.arithmetic.combine, low, high, results[number])

        return received, combine

    def _chunks(self, array: np.ndarray) -> list[np.ndarray]:
        return chunks(array, 0, array.size, self.step)

    def _transfer(
        self,
        partner: int,
        length: int,
        outgoing: np.ndarray | None = None,
        incoming: Sequence[np.ndarray] = (),
        take: Callable[[int], None] | None = None,
    ) -> None:
        """Send an array to another rank, and receive chunks from it; call ``take(number)`` for each.

        `length` is the largest number of elements that any rank sends in this step, so that all ranks
        meet equally often.
        """
        sending = [] if outgoing is None else self._chunks(outgoing)
        receipts, sent = [], []
        count = -(-length // self.step)

        def start(number: int) -> None:
            receipts.append(
                [
                    self.group.receive_array(partner, one, _STREAM)
                    for one in incoming[number : number + 1]
                ]
            )
            sent.append(
                [self.group.send_array(partner, one, _STREAM) for one in sending[number : number + 1]]
            )

        for number in range(min(WINDOW, count)):
            start(number)
        for number in range(count):
            self.group.complete(receipts[number], sent[number])
            if take is not None:
                take(number)
            if number + WINDOW < count:
                start(number + WINDOW)


class _Side(NamedTuple):
    """A rank in a round.

    Attributes
    ----------
    rank : int
        The rank.
    is_given : bool
        Whether its elements are those of its array as it was given, and no combinations.
    is_active : bool
        Whether they are used.
    """

    rank: int
    is_given: bool
    is_active: bool

    def operand(self, array: np.ndarray) -> Operand:
        """Return elements of this rank as an operand."""
        return Operand(array, self.rank if self.is_given else None)
