"""A vector in a graph that is filled and reduced bucket by bucket.

Nothing waits in the graph. After filling a bucket, the graph runs an operation that notifies the other
ranks that it is ready. The operation returns the vector itself. It is in the chain of the collectives,
so all ranks announce the buckets in the same order.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Sequence

import numpy as np

from synkhronos.arithmetic.buckets import Buckets, divide
from synkhronos.engines.collectives import Collective
from synkhronos.engines.names import Apply, FunctionGraph, SharedVariable, TensorType, Variable
from synkhronos.engines.names import tensor as tt

_numbers = itertools.count()


class BucketReady(Collective):
    """A bucket is ready: ``(peers, vector)`` to ``(peers, vector)``, the same vector.

    Parameters
    ----------
    buckets : Buckets
        How the vector is divided.
    bucket : int
        The number of the bucket.
    """

    __props__ = ("buckets", "bucket", "number")
    view_map = {1: [1]}

    def __init__(self, buckets: Buckets, bucket: int, number: int | None = None) -> None:
        super().__init__(None, number)
        self.buckets, self.bucket = buckets, bucket

    def __str__(self) -> str:
        return f"Ready{{bucket {self.bucket} of {len(self.buckets.shapes)}}}"

    def numbered(self, number: int | None) -> BucketReady:
        return BucketReady(self.buckets, self.bucket, number)

    def perform(self, node: Apply, inputs: list[Any], outputs: list[list[Any]]) -> None:
        peers, vector = inputs
        if peers is not None:
            peers.start(vector, self.buckets, self.bucket)
        outputs[0][0], outputs[1][0] = peers, vector

    def _gradient(self, inputs: list[Variable], gradient: Variable) -> Variable:
        return gradient

    def _derivative(self, inputs: list[Variable], tangent: Variable) -> Variable:
        return tangent


def is_on_host(vector: SharedVariable) -> bool:
    """Whether a shared variable is a NumPy array, and not on a device."""
    return isinstance(vector.type, TensorType)


def fill_in_buckets(
    vector: SharedVariable,
    expressions: Sequence[Variable],
    shapes: Sequence[tuple[int, ...]],
    op: str,
    wire: Any,
    is_overlapped: bool,
) -> Variable:
    """Return a vector with the values of expressions, written in place; see ``synkhronos.ops``.

    If not `is_overlapped`, other ranks are not notified of the buckets.
    """
    groups = divide(shapes, np.dtype(vector.dtype).itemsize)
    buckets = Buckets(
        number=next(_numbers),
        op=op,
        wire=wire,
        dtype=vector.dtype,
        shapes=tuple(tuple(shapes[group.start : group.stop]) for group in groups),
    )
    new, stop = vector, buckets.size
    for bucket, group in enumerate(groups):
        for index in reversed(group):
            start = stop - math.prod(shapes[index])
            new = tt.set_subtensor(new[start:stop], expressions[index].flatten())
            stop = start
        if is_overlapped:
            new = BucketReady(buckets, bucket).of(new)
    vector.tag.buckets = buckets if is_overlapped else None
    return new


def schedule_buckets_early(fgraph: FunctionGraph) -> list[Apply]:
    """Return the operations of a graph in an order in which each bucket is ready as soon as possible.

    It is a schedule for a linker of the compiler. With the compiler's own schedule, the gradients of
    several layers may be computed before the first of them is put into the vector.
    """
    order = fgraph.toposort()
    places = {node: place for place, node in enumerate(order)}
    before, found = fgraph.orderings(), []
    for last in [node for node in order if isinstance(node.op, BucketReady)]:
        needed, waiting = set(), [last]
        while waiting:
            node = waiting.pop()
            if node in places and node not in needed:
                needed.add(node)
                waiting += [variable.owner for variable in node.inputs if variable.owner is not None]
                waiting += before.get(node, ())
        found += sorted(needed, key=places.__getitem__)
        for node in needed:
            del places[node]
    return found + [node for node in order if node in places]
