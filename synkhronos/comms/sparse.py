"""The wire format `TopK`: every leader sends the largest numbers of its share to all others.

All leaders add up the numbers that they have received, in the same order. Each leader
keeps the numbers that it has not sent.
"""

from __future__ import annotations

import math

import numpy as np

from synkhronos.arithmetic.largest import largest, nbytes_of, pack, unpack
from synkhronos.comms.wires import Wire, WireReduction


class SparseWire(Wire):
    """The largest numbers, and an array of the numbers that were not sent."""

    def reset(self) -> None:
        self.count = 0
        self._rest: np.ndarray | None = None

    def state(self) -> tuple[np.ndarray, np.ndarray]:
        if self._rest is None:
            self._rest = np.zeros(self._size, np.float32)
        return self._rest, super().state()[1]

    def all_reduce(self, wires: WireReduction, array: np.ndarray, scale: float, are_alike: bool) -> None:
        rest, _ = self.state()
        if scale:
            if scale != 1:
                array *= np.float32(scale)
            rest += array
        count = math.ceil(self.format.fraction * array.size)
        data = wires.memory([nbytes_of(count, array.size)] * wires.size)
        group, others = wires.group, [rank for rank in range(wires.size) if rank != wires.rank]
        receipts = [group.receive_array(other, data[other]) for other in others]
        indices = largest(rest, count)
        pack(indices, rest[indices], array.size, data[wires.rank])
        sent = [group.send_array(other, data[wires.rank]) for other in others]
        rest[indices] = 0
        array[:] = 0
        group.complete(receipts, sent)
        for item in data:
            indices, values = unpack(item, count, array.size)
            array[indices] += values
