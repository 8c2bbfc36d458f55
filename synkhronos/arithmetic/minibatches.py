"""Orders of rows: the minibatches of one rank, and the batches of a loader for all; pure arithmetic."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from synkhronos.arithmetic.partition import share


def n_batches(length: int, ranks: int, batch_size: int) -> int:
    """Return the number of minibatches of an epoch, which is the same for every rank.

    The longest share is split into minibatches of at most `batch_size` rows. No rank has fewer rows than
    there are minibatches, so with ``batch_size=1`` the shortest share counts.
    """
    longest, shortest = -(-length // ranks), length // ranks
    return min(-(-longest // batch_size), shortest)


def make_minibatches(
    length: int,
    ranks: int,
    rank: int,
    batch_size: int,
    epoch: int = 0,
    seed: int | None = None,
) -> list[np.ndarray]:
    """Return the minibatches of one rank in one epoch, each an array of row numbers.

    Parameters
    ----------
    length : int
        The number of rows of all ranks.
    ranks, rank : int
        The number of ranks, and this rank.
    batch_size : int
        The largest number of rows in a minibatch.
    epoch : int
        The number of the epoch, from 0; each has its own order.
    seed : int, optional
        Determines the order, with `epoch` and `rank`. Without it, the rows are in ascending order.

    Returns
    -------
    list of numpy.ndarray
        `n_batches` arrays of dtype int64. Their lengths differ by at most one row.
    """
    start, stop = share(length, ranks, rank)
    rows = np.arange(start, stop)
    if seed is not None:
        np.random.default_rng([seed, epoch, rank]).shuffle(rows)
    count = n_batches(length, ranks, batch_size)
    rows = rows[: count * batch_size]
    return [rows[slice(*share(len(rows), count, index))] for index in range(count)]


class BatchPlan(NamedTuple):
    """The batches of consecutive epochs, numbered from 0 throughout, for one consumer or for each rank.

    Each rank gets its share of every batch, so that the ranks together get the batches of one consumer.

    Attributes
    ----------
    length : int
        The number of rows of the source.
    batch_size : int
        The number of rows of a batch, of all ranks together.
    seed : int
    shuffle, drop_last : bool
        Whether each epoch has a new order, and whether its last rows are left out if they are fewer than
        a batch. Fewer rows than ranks are always left out.
    ranks : int
        The number of consumers.
    first : int
        The first epoch.
    epochs : int or None
        The number of epochs; None for no end.
    processes : int
        The number of processes that load.
    takes_turns : bool
        Whether one process loads all rows of a batch; otherwise each loads a part of them.
    """

    length: int
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool
    processes: int
    takes_turns: bool
    ranks: int = 1
    first: int = 0
    epochs: int | None = None

    @property
    def n_batches(self) -> int:
        """The number of batches of an epoch."""
        full, rest = divmod(self.length, self.batch_size)
        return full + (rest >= self.ranks and rest > 0 and not self.drop_last)

    def has(self, number: int) -> bool:
        """Whether there is a batch of this number."""
        return self.epochs is None or number < self.epochs * self.n_batches

    def locate(self, number: int) -> tuple[int, int]:
        """Return the epoch of a batch, and its number there."""
        epoch, batch = divmod(number, self.n_batches)
        return self.first + epoch, batch

    def order(self, source: Any, epoch: int) -> np.ndarray:
        """Return the row numbers of an epoch, in their order."""
        if not self.shuffle:
            return np.arange(self.length)
        order = np.asarray(source.order(np.random.default_rng([self.seed, epoch])), np.int64)
        if order.shape != (self.length,):
            raise ValueError(
                f"Source.order: expected an array of {self.length} row numbers, got one of {order.shape}"
            )
        if order.min() < 0 or order.max() >= self.length:
            raise ValueError(
                f"Source.order: expected row numbers below {self.length}, got {order.min()} to "
                f"{order.max()}"
            )
        return order

    def share(self, batch: int, rank: int) -> range:
        """Return the places of the rows of a rank in a batch, which is numbered within its epoch."""
        rows = min(self.batch_size, self.length - batch * self.batch_size)
        return _part(range(rows), self.ranks, rank)

    def place(self, rank: int) -> int:
        """Return where the rows of a rank begin in a slot, also those of a shorter batch.

        Another rank may be at another batch, which must not have rows there.
        """
        return _part(range(self.batch_size), self.ranks, rank).start

    def part(self, number: int, rank: int, process: int) -> range:
        """Return the places in a batch of the rows that a process loads for a rank."""
        rows = self.share(self.locate(number)[1], rank)
        if self.takes_turns:
            return rows if number % self.processes == process else rows[:0]
        return _part(rows, self.processes, process)


def _part(rows: range, parts: int, index: int) -> range:
    """Return a part of rows that are split as evenly as possible."""
    return rows[slice(*share(len(rows), parts, index))]
