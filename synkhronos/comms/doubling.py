"""The all-reduce by recursive doubling, for small arrays.

In round k, each rank exchanges its partial result with the rank whose place differs by ``2**k``, and
combines the two. After ``log2(size)`` rounds all ranks have combined the arrays of all, in the same
order of operands, so with the same bits. If the number of ranks is not a power of two, the first rank of
some pairs sends its array to the second before, and gets the result after [1]_. All arrays travel in one
message.

.. [1] Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH, 2005.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

import numpy as np

from synkhronos.arithmetic.pairwise import Operand, PairwiseReduction

if TYPE_CHECKING:
    from synkhronos.comms.base import LinkedRanks

_ALIGNMENT = 16  # bytes
_STREAM = 0


class DoublingReduction:
    """The reduction of flat arrays, in place.

    Parameters
    ----------
    comm : LinkedRanks
        The communicator of these ranks.
    arithmetic : PairwiseReduction
        The operation, and the ranks whose arrays are reduced.
    arrays : list of numpy.ndarray
        The flat arrays of this rank.
    """

    def __init__(
        self, comm: LinkedRanks, arithmetic: PairwiseReduction, arrays: Sequence[np.ndarray]
    ) -> None:
        self.comm, self.group, self.rank = comm, comm.group, comm.rank
        self.arithmetic, self.arrays = arithmetic, arrays
        kinds = [(one.size, arithmetic.dtype(one.dtype)) for one in arrays]
        lengths = [-(-size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for size, dtype in kinds]
        ends = np.cumsum([0, *lengths]).tolist()
        memory = comm.memory(2 * ends[-1], np.dtype(np.uint8)).reshape(2, ends[-1])
        self.own, self.received = memory
        self.partial, self.other = (
            [
                each[start : start + size * dtype.itemsize].view(dtype)
                for start, (size, dtype) in zip(ends, kinds)
            ]
            for each in memory
        )
        self.has_partial = arithmetic.active[self.rank]
        self.acts_for_pair = arithmetic.core.acts_for_pair(self.rank)

    def run(self) -> None:
        arithmetic, core = self.arithmetic, self.arithmetic.core
        place = core.place(self.rank)
        if self.has_partial:
            for array, partial in zip(self.arrays, self.partial):
                arithmetic.combine(Operand(array, self.rank), None, partial)
        if core.pairs:
            self._fold(place)
        for turn in range(core.rounds):
            if place is None:
                self._exchange(self.rank, False, False)
                continue
            other = place ^ (1 << turn)
            does_receive = arithmetic.has_active(core.block(other, 1 << turn))
            self._exchange(core.rank(other), self.has_partial, does_receive)
            self._combine(does_receive, other < place)
        if core.pairs:
            self._unfold(place)
        for array, partial in zip(self.arrays, self.partial):
            arithmetic.finish(partial, array)

    def _fold(self, place: int | None) -> None:
        """Let the second rank of each pair act for both."""
        partner = self.rank ^ 1
        if place is None:
            self._exchange(partner, self.has_partial, False)
            self.has_partial = False
            return
        does_receive = self.acts_for_pair and self.arithmetic.active[partner]
        self._exchange(partner, False, does_receive)
        self._combine(does_receive, True)

    def _unfold(self, place: int | None) -> None:
        """Give the first rank of each pair the result."""
        self._exchange(self.rank ^ 1, self.acts_for_pair, place is None)
        self._combine(place is None, True)

    def _exchange(self, partner: int, does_send: bool, does_receive: bool) -> None:
        """Send the partial results to another rank, and receive its partial results."""
        receipts = [self.group.receive_array(partner, self.received, _STREAM)] if does_receive else []
        sent = [self.group.send_array(partner, self.own, _STREAM)] if does_send else []
        self.group.complete(receipts, sent)

    def _combine(self, has_received: bool, is_lower: bool) -> None:
        """Combine the partial results with the received ones, which are of lower ranks if `is_lower`."""
        if not has_received:
            return
        for partial, other in zip(self.partial, self.other):
            operands = [Operand(partial) if self.has_partial else None, Operand(other)]
            if is_lower:
                operands.reverse()
            self.comm.reduce_part(self.arithmetic.combine, *operands, partial)
        self.has_partial = True
