"""What a process of a loader does: it reads, transforms and writes its parts of the batches."""

from __future__ import annotations

import traceback
from typing import Any, Sequence

import numpy as np

from synkhronos.extensions.loaders.draws import Draws
from synkhronos.extensions.loaders.plan import Plan
from synkhronos.extensions.loaders.ring import Ring
from synkhronos.extensions.loaders.sources import Source, UnreadableError
from synkhronos.extensions.loaders.transforms import Transform

_MOST_ORDERS = 4
_LONGEST = 60.0  # seconds of one wait; a process is woken when there is something to do


class Producer:
    """One process of a loader.

    Parameters
    ----------
    number : int
        Of the process.
    ring : Ring
    source : Source
    transforms : sequence of callable
        Applied to the first array of the source.
    skips : bool
        Whether rows that cannot be read are left out.
    """

    def __init__(
        self,
        number: int,
        ring: Ring,
        source: Source,
        transforms: Sequence[Transform],
        skips: bool,
    ) -> None:
        self._number, self._ring, self._source = number, ring, source
        self._transforms, self._skips = transforms, skips
        self._bell = ring.free(number)
        self._orders: dict[int, np.ndarray] = {}  # of the epochs in which the ranks are

    def serve(self, connection: Any) -> None:
        """Load what is asked for, until the connection is closed."""
        while True:
            try:
                generation, plan = connection.recv()
            except EOFError:
                return
            try:
                self._produce(generation, plan, connection)
            except UnreadableError as error:
                self._ring.fail(
                    self._number,
                    f"loading: {error.name} cannot be read: {error.reason}; remove or replace it, or "
                    f"leave such rows out: Loader(..., unreadable='skip')",
                    plan.ranks,
                )
            except BaseException:
                self._ring.fail(
                    self._number,
                    f"loading: process {self._number} raised an exception:\n{traceback.format_exc()}",
                    plan.ranks,
                )

    def _produce(self, generation: int, plan: Plan, connection: Any) -> None:
        """Load batches until there are no more, or something else is asked for."""
        ring, number = self._ring, self._number
        self._orders.clear()
        ring.failed[number] = 0
        ring.filled[:, number] = 0
        ring.begun[number] = generation
        ring.ready(0).post()
        following = [0] * plan.ranks
        while True:
            self._bell.drain()
            if connection.poll():
                return
            is_idle = True
            # While all processes are not ready, an old part could still be written to a slot.
            for rank in range(plan.ranks if ring.go[0] == generation else 0):
                batch = following[rank]
                if plan.has(batch) and batch < ring.taken[rank] + ring.layout.slots:
                    self._load(plan, batch, rank)
                    following[rank] += 1
                    ring.filled[rank, number] = following[rank]
                    ring.ready(rank).post()
                    is_idle = False
            if is_idle:
                self._bell.wait(_LONGEST)

    def _load(self, plan: Plan, number: int, rank: int) -> None:
        """Write this process's part of a batch to its slot."""
        places = plan.part(number, rank, self._number)
        slot = number % self._ring.layout.slots
        count = 0
        if len(places):
            epoch, batch = plan.locate(number)
            rows = self._rows_of(plan, epoch)[batch * plan.batch_size :][: plan.batch_size]
            arrays, kept = self.read(rows[places.start : places.stop])
            count = len(kept)
            if count:
                draws = Draws(plan.seed, epoch, kept, int(rows[0]))
                arrays[0] = self.transform(arrays[0], draws)
                offset = plan.place(rank) - plan.share(batch, rank).start
                self._write(slot, offset + places.start, arrays)
        self._ring.counts[slot, rank, self._number] = count

    def _rows_of(self, plan: Plan, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            if len(self._orders) >= _MOST_ORDERS:
                del self._orders[min(self._orders)]
            self._orders[epoch] = plan.order(self._source, epoch)
        return self._orders[epoch]

    def read(self, rows: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Return rows of the source, and the numbers of those that could be read."""
        try:
            return list(self._source.read(rows)), rows
        except UnreadableError:
            if not self._skips:
                raise
        found, kept = [], []
        for row in rows:
            try:
                found.append(self._source.read(np.array([row])))
                kept.append(row)
            except UnreadableError:
                self._ring.unreadable[row] = 1
                self._ring.n_skipped[self._number] += 1
        return [np.concatenate(parts) for parts in zip(*found)], np.array(kept, np.int64)

    def transform(self, images: np.ndarray, draws: Draws) -> np.ndarray:
        """Apply the transforms, in their order."""
        return apply(self._transforms, images, draws)

    def _write(self, slot: int, start: int, arrays: Sequence[np.ndarray]) -> None:
        for number, (array, field) in enumerate(zip(arrays, self._ring.fields)):
            target = field[slot, start : start + len(array)]
            if array.shape != target.shape:
                raise ValueError(
                    f"loading: expected all rows of array {number} to have the shape of the first, "
                    f"{target.shape[1:]}, got {array.shape[1:]} for {len(array)} of {len(target)} rows"
                )
            np.copyto(target, array, casting="same_kind")


def apply(transforms: Sequence[Transform], images: np.ndarray, draws: Draws) -> np.ndarray:
    """Return images after all transforms.

    Raises
    ------
    ValueError
        If a transform returns another number of images.
    """
    for transform in transforms:
        result = np.asarray(transform(images, draws))
        if result.ndim == 0 or len(result) != len(images):
            raise ValueError(
                f"loading: expected {transform!r} to return {len(images)} images, got an array of "
                f"{result.shape}"
            )
        images = result
    return images
