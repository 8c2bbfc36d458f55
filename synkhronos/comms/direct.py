"""The direct all-reduce: each rank exchanges its part of an array with every other rank.

A reduce-scatter and an all-gather: each rank receives its part of the elements from every other rank,
reduces it, and sends the result to all. It sends and receives ``2 (size - 1) / size`` times the bytes of
the array, which is the minimum [1]_, in ``2 (size - 1)`` messages or more. The parts are sent in chunks;
a chunk is reduced while the next chunks are being sent. A rank sends a few chunks ahead of those
received, so memory and messages under way do not grow with the array.

.. [1] Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Sequence

import numpy as np

from synkhronos.arithmetic.pairwise import PairwiseReduction
from synkhronos.arithmetic.partition import share

if TYPE_CHECKING:
    from synkhronos.comms.base import LinkedRanks

CHUNK = 240 << 10  # bytes
WINDOW = 3  # chunks that a rank sends to another rank before it has received the first from it

PARTS, RESULTS = range(2)  # streams of arrays


class DirectReduction:
    """The reduction of a flat array, in place, on the ranks in `targets`.

    Parameters
    ----------
    comm : LinkedRanks
        The communicator of these ranks.
    arithmetic : PairwiseReduction
        The operation, and the ranks whose arrays are reduced.
    array : numpy.ndarray
        The flat array of this rank.
    targets : list of int
        The ranks that get the result.
    """

    def __init__(
        self,
        comm: LinkedRanks,
        arithmetic: PairwiseReduction,
        array: np.ndarray,
        targets: Sequence[int],
    ) -> None:
        self.comm, self.group, self.rank = comm, comm.group, comm.rank
        self.arithmetic, self.targets = arithmetic, targets
        step = max(CHUNK // array.itemsize, 1)
        self.parts = [
            chunks(array, *share(array.size, comm.size, rank), step) for rank in range(comm.size)
        ]
        # Each rank begins with the next rank, as otherwise rank 0 would get the chunks of all at once.
        self.others = [(self.rank + step) % comm.size for step in range(1, comm.size)]
        self.senders = [rank for rank in self.others if arithmetic.active[rank]]
        own = self.parts[self.rank]
        shape = len(self.senders), min(WINDOW, len(own)), own[0].size if own else 0
        self.memory = comm.memory(math.prod(shape), array.dtype).reshape(shape)
        self.receipts: dict[int, list] = {}  # by number of the chunk
        self.sent: dict[int, list[int]] = {}

    def run(self) -> None:
        own, count = self.parts[self.rank], max(len(part) for part in self.parts)
        results, arriving = [], []
        for number in range(WINDOW):
            self._start(number)
        for number in range(count):
            self.group.complete(self.receipts.pop(number))
            if number < len(own):
                results += self._reduce_chunk(number)
            # The result of a chunk arrives in its memory, so the chunk has to be sent first.
            self.group.complete([], self.sent.pop(number))
            if self.rank in self.targets:
                arriving += [
                    self.group.receive_array(rank, self.parts[rank][number], RESULTS)
                    for rank in self.others
                    if number < len(self.parts[rank])
                ]
            self._start(number + WINDOW)
        self.group.complete(arriving, results)

    def _start(self, number: int) -> None:
        """Start to receive a chunk of this rank's part, and to send a chunk of each other part."""
        is_own = number < len(self.parts[self.rank])
        self.receipts[number] = [
            self.group.receive_array(rank, self._received(index, number), PARTS)
            for index, rank in enumerate(self.senders)
            if is_own
        ]
        self.sent[number] = [
            self.group.send_array(rank, self.parts[rank][number], PARTS)
            for rank in self.others
            if self.arithmetic.active[self.rank] and number < len(self.parts[rank])
        ]

    def _received(self, index: int, number: int) -> np.ndarray:
        """Return the memory for a chunk from a sender. It is used again by later chunks."""
        return self.memory[index, number % WINDOW, : self.parts[self.rank][number].size]

    def _reduce_chunk(self, number: int) -> list[int]:
        own = self.parts[self.rank][number]
        arrays: list[np.ndarray | None] = [None] * self.comm.size
        for index, rank in enumerate(self.senders):
            arrays[rank] = self._received(index, number)
        arrays[self.rank] = own
        self.comm.reduce_part(self.arithmetic.reduce, own, arrays)
        return [self.group.send_array(rank, own, RESULTS) for rank in self.targets if rank != self.rank]


def chunks(array: np.ndarray, start: int, stop: int, step: int) -> list[np.ndarray]:
    """Return views of the items from `start` to `stop`, in chunks of `step` items."""
    return [array[low : min(low + step, stop)] for low in range(start, stop, step)]
