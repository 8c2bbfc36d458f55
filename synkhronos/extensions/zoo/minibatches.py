"""The minibatches of one rank: its share of a data set, in a new order in each epoch."""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np

from synkhronos.extensions.zoo.data import DataSet

Batch = Tuple[Any, Any]


class Minibatches:
    """What the attribute ``data`` of a model is.

    In each epoch the training rows are put into an order that depends on the seed and the epoch alone.
    Every rank takes the same number of minibatches from it, and none of these have a row in common. The
    rows that are left over differ from epoch to epoch. Each validation row is used once, on one rank.

    Parameters
    ----------
    dataset : DataSet
        What is trained on.
    batch_size : int
        Training rows of a rank in a minibatch; the most validation rows.
    n_subb : int
        Minibatches that count as one in `n_batch_train` and `n_batch_val`.
    rank, size : int
        The rank, and the number of ranks.
    seed : int
        The same on every rank.
    pixels : int, optional
        Images are scaled to this height and width.
    symmetric : bool
        Whether the values of pixels are between -1 and 1, as generators make them, instead of with the
        mean 0 and the deviation 1 in each channel of the training rows.

    Attributes
    ----------
    n_batch_train, n_batch_val : int
        The number of minibatches of a rank in an epoch, and for the validation.

    Raises
    ------
    ValueError
        If there are too few rows for one minibatch of each rank.
    """

    def __init__(
        self,
        dataset: DataSet,
        batch_size: int,
        n_subb: int = 1,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        pixels: int | None = None,
        symmetric: bool = False,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank: expected a number from 0 to {size - 1}, got {rank}")
        self.dataset, self.batch_size, self.rank, self.size = dataset, batch_size, rank, size
        n_train, n_val = len(dataset.train.labels), len(dataset.val.labels)
        self.n_batch_train = n_train // (batch_size * n_subb * size)
        wanted = -(-n_val // (batch_size * n_subb * size))
        self.n_batch_val = min(wanted, n_val // (n_subb * size))
        if not self.n_batch_train or not self.n_batch_val:
            raise ValueError(
                f"expected rows for at least one minibatch of each rank: "
                f"{batch_size * n_subb * size} to train and {n_subb * size} to validate, got {n_train} "
                f"and {n_val}; reduce batch_size"
            )
        self._n_subb, self._seed, self._pixels = n_subb, seed, pixels
        normalization: tuple[Any, Any] = (0.5, 2.0) if symmetric else dataset.normalization()
        self._shift, self._scale = normalization
        self._chunks = np.array_split(np.arange(n_val), self.n_batch_val * n_subb * size)
        self._order = np.arange(n_train)

    def shuffle(self, epoch: int) -> None:
        """Put the training rows into the order of an epoch."""
        random = np.random.RandomState([self._seed, epoch])
        self._order = random.permutation(len(self._order))

    def train_batch(self, number: int) -> Batch:
        """Return a minibatch of this rank, of ``n_batch_train * n_subb``: rows and labels."""
        start = (number * self.size + self.rank) * self.batch_size
        return self._load(self.dataset.train, self._order[start : start + self.batch_size])

    def val_batch(self, number: int) -> Batch:
        """Return a validation minibatch of this rank, of ``n_batch_val * n_subb``: rows and labels."""
        return self._load(self.dataset.val, self._chunks[number * self.size + self.rank])

    def _load(self, part: Any, rows: np.ndarray) -> Batch:
        values = part.load(rows, self._pixels)
        if values.ndim == 4:
            values = np.asarray((values - self._shift) * self._scale, "float32")
        return values, part.labels[rows]
