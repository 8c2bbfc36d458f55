"""Moves the state of wire formats, which couriers keep for vectors, between leaders and couriers.

A courier all-reduces the buckets of a vector with the other couriers, so it is the courier that keeps
what a format has not sent. For a checkpoint it copies this to the commons, where the leader finds it, or
takes from there what the leader has put.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from synkhronos.arithmetic.buckets import Buckets
from synkhronos.comms.wire_state import Kept, kept_by, restore
from synkhronos.machines.buckets import BucketCommunicator
from synkhronos.machines.courier import Desk
from synkhronos.machines.leaders import Leaders
from synkhronos.stores.commons import Commons

_KEPT = "ahead"
_DONE, _REST, _FACTORS, _COUNTS = range(4)  # words of the table; the counts are the last ones


def communicator_of(desk: Desk) -> tuple[Leaders, BucketCommunicator]:
    """Return what a courier needs to reduce buckets; all `Work` of a world shares it."""
    if _KEPT not in desk.kept:
        leaders = Leaders(desk.links)
        leaders.may_poll = False  # the ranks need the cores
        desk.kept[_KEPT] = leaders, BucketCommunicator(leaders)
    return desk.kept[_KEPT]


def vector(commons: Commons, buckets: Buckets, rank: int) -> np.ndarray:
    """Return the memory for the vector of a rank of a machine.

    Vectors of the same size have the same memory. Between commands nothing refers to it, so it can be
    freed at the end of a program.
    """
    return commons.array(f"ahead {buckets.dtype} {buckets.size} {rank}", buckets.size, buckets.dtype)


class Shelf(NamedTuple):
    """Where a `Kept` of a vector is in the commons, in one command.

    Attributes
    ----------
    commons : Commons
    buckets : Buckets
    """

    commons: Commons
    buckets: Buckets

    @property
    def table(self) -> np.ndarray:
        """Whether the work is done, how long the vectors are, and the counts; 0 between commands."""
        length = _COUNTS + len(self.buckets.shapes)
        return self.commons.array(f"kept {length}", length, np.int64)

    def put(self, kept: Kept) -> None:
        """Write what is kept."""
        table = self.table
        table[_REST], table[_FACTORS], table[_COUNTS:] = kept.rest.size, kept.factors.size, kept.counts
        for own, given in zip(self._vectors(table), kept[1:]):
            own[:] = given

    def get(self) -> Kept:
        """Return what was put here, without copying the vectors."""
        table = self.table
        return Kept(table[_COUNTS:].tolist(), *self._vectors(table))

    def _vectors(self, table):
        rest, factors = vector(self.commons, self.buckets, 0), np.empty(0, np.float32)
        if length := int(table[_FACTORS]):
            factors = self.commons.array(f"kept factors {length}", length, np.float32)
        return rest[: table[_REST]], factors

    def mark_done(self) -> None:
        """Let the leader continue."""
        self.table[_DONE] = 1

    def is_done(self) -> bool:
        """Whether the courier has done its work."""
        return bool(self.table[_DONE])


class CopyKept:
    """What a courier does for the transfer. It is a `Work`.

    Parameters
    ----------
    buckets : Buckets
    is_given : bool
        Whether the leader gives the state or gets it.
    """

    def __init__(self, buckets: Buckets, is_given: bool) -> None:
        self._buckets, self._is_given = buckets, is_given

    def run(self, desk: Desk) -> None:
        wires = communicator_of(desk)[1].wires(self._buckets)
        shelf = Shelf(desk.commons, self._buckets)
        if self._is_given:
            restore(wires, self._buckets.sizes(), shelf.get())
        else:
            shelf.put(kept_by(wires))
        shelf.mark_done()
