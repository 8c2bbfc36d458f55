"""The minibatches of each rank, for a program."""

from __future__ import annotations

import functools
from typing import Iterator

import numpy as np

import synkhronos as synk
from synkhronos.extensions.loaders.consumer import Consumer, Processes, check_alive
from synkhronos.extensions.loaders.plan import Plan
from synkhronos.extensions.loaders.ring import Ring
from synkhronos.services.background_processes import has_ended


class Shards:
    """The minibatches of all ranks, made by `Loader.shards`. It is given to a program as an argument.

    Parameters
    ----------
    ring : Ring
    plan : Plan
    generation : int
    processes : Processes
    """

    def __init__(self, ring: Ring, plan: Plan, generation: int, processes: Processes) -> None:
        self._ring, self._plan, self._generation = ring, plan, generation
        self._processes = processes

    def __len__(self) -> int:
        """Return the number of minibatches of each rank, in all epochs."""
        return self._plan.n_batches * (self._plan.epochs or 0)

    def __repr__(self) -> str:
        return f"<Shards: {len(self)} minibatches for each of {self._plan.ranks} ranks>"

    def minibatches(self, rank: synk.Rank) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield the arrays of a rank's minibatches, one after the other.

        It ends early when the ranks are asked to stop, as ``rank.minibatches`` does. A minibatch whose
        rows can all not be read is left out.

        Parameters
        ----------
        rank : synkhronos.Rank
            The first argument of the program.

        Yields
        ------
        tuple of numpy.ndarray
            One array for each array of the source: the rank's share of the rows of a batch. They are
            views of the shared memory, read-only, and valid until the next minibatch.
        """
        if rank.size != self._plan.ranks:
            raise ValueError(
                f"Shards.minibatches: expected a program on {self._plan.ranks} ranks, for which the "
                f"shards were made, got {rank.size}"
            )
        check = functools.partial(self._check, rank)
        consumer = Consumer(self._ring, self._plan, self._generation, rank.rank, check, self._processes)
        while self._plan.has(consumer.number):
            if rank.should_stop:
                return
            slot, rows = consumer.take()
            if rows.stop > rows.start:
                yield tuple(map(_protected, consumer.arrays(slot, rows)))
            consumer.release()

    def _check(self, rank: synk.Rank) -> None:
        rank.clock  # noqa: B018  # raises if the program has to end because another rank has failed
        check_alive(has_ended, self._processes.pids)


def _protected(array: np.ndarray) -> np.ndarray:
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view
