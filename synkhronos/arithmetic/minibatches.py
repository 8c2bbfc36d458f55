"""Minibatches of the rows of one rank, in a random order: pure arithmetic."""

from __future__ import annotations

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
