"""All-reduces of a vector in buckets, between machines that each have the vectors of several ranks.

On each machine, a process that is not a rank reduces them in the memory of the ranks. It reduces the
ranks' vectors into the first one, which is then reduced between the machines. The arithmetic is the same
as in an all-reduce of all ranks, so on two machines the results are bit-identical. On more machines,
sums have another order.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

from synkhronos.arithmetic.buckets import Buckets
from synkhronos.arithmetic.operations import find_operation
from synkhronos.comms.base import Linked
from synkhronos.comms.formats import make_wire
from synkhronos.comms.linked import LinkedCommunicator
from synkhronos.comms.wires import Wire, WireReduction


class BucketCommunicator:
    """Reduces buckets, and keeps the states of wire formats between reductions.

    Parameters
    ----------
    group : Linked
        The machines.
    """

    def __init__(self, group: Linked) -> None:
        self._linked = LinkedCommunicator(group)
        self._wires = WireReduction(self._linked)
        self._kept: dict[int, list[Wire]] = {}  # by the number of the vector

    def all_reduce(
        self,
        buckets: Buckets,
        number: int,
        vectors: Sequence[np.ndarray],
        weights: Sequence[int],
    ) -> None:
        """Set a bucket of the first vector to its reduction over all ranks.

        Parameters
        ----------
        buckets : Buckets
            The buckets of the vector.
        number : int
            The number of the bucket.
        vectors : list of numpy.ndarray
            The vectors of this machine's ranks. Vectors of weight 0 are ignored in an average.
        weights : list of int
            The weight of each vector.
        """
        operation, place = find_operation(buckets.op), buckets.slices()[number]
        active = [
            (vector[place], weight)
            for vector, weight in zip(vectors, weights)
            if weight or not operation.weighted
        ]
        own = vectors[0][place]
        if active and len(vectors) > 1:
            operation.reduce_in_pieces(own, *zip(*active))
        total = sum(weights)
        if buckets.wire is None:
            [reduced] = self._linked.all_reduce([own], buckets.op, total)
        else:
            wire = self.wires(buckets)[number]
            [reduced] = self._wires.all_reduce([own], buckets.op, total, [wire])
        if reduced is not own:
            own[...] = reduced

    def wires(self, buckets: Buckets) -> list[Wire]:
        """Return the state of the wire format for each bucket of a vector."""
        if buckets.number not in self._kept:
            self._kept[buckets.number] = [make_wire(buckets.wire, shapes) for shapes in buckets.shapes]
        return self._kept[buckets.number]
