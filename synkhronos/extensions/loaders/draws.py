"""Random numbers that depend on the seed, the epoch and the row, and on nothing else.

A generator with a state would have to be created for each row. Here a number is a hash of its place, so
the numbers of many rows are computed at once, by any process. The hash is that of SplitMix64 [1]_: the
i-th number of a generator with the state s is ``mix(s + (i + 1) * GAMMA)``. It is applied once for each
part of the place, and the result is the state for the next part.

.. [1] Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from synkhronos._checks import check_choice, check_int, check_shape, is_int
from synkhronos._typing import Shape

#: Whether each image has its own numbers, or all images of a batch have the same.
KINDS = ("image", "batch")

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mix(states: np.ndarray, numbers: np.ndarray | int) -> np.ndarray:
    """Return the random numbers at places in the sequences of states; both are uint64."""
    # With at least one axis, as NumPy warns of scalars that overflow.
    z = states + (np.atleast_1d(np.asarray(numbers, np.uint64)) + np.uint64(1)) * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


def _state_of(seed: int, epoch: int) -> np.ndarray:
    return _mix(_mix(np.zeros(1, np.uint64), seed % 2**64), epoch)


def seeds_of(seed: int, epoch: int, rows: np.ndarray, purpose: int) -> np.ndarray:
    """Return a seed of 31 bits for each row, with which other generators are seeded for a purpose."""
    states = _mix(_state_of(seed, epoch), rows)
    return (_mix(states, 2**64 - 3 - purpose) >> np.uint64(33)).astype(np.int64)


class Draws:
    """The random numbers for some rows of a batch. Each call returns new numbers.

    Parameters
    ----------
    seed, epoch : int
    rows : numpy.ndarray of int64
        The numbers of the rows in the source.
    first : int
        The number of the first row of the whole batch, which determines the numbers for the batch.

    Attributes
    ----------
    epoch : int
        The number of the epoch, such as for a schedule of an augmentation.
    """

    def __init__(self, seed: int, epoch: int, rows: np.ndarray, first: int) -> None:
        self.epoch = epoch
        self._seed, self._rows, self._first = seed, rows, first
        self._calls = 0

    def __len__(self) -> int:
        return len(self._rows)

    @functools.cached_property
    def _states(self) -> dict[str, np.ndarray]:
        state = _state_of(self._seed, self.epoch)
        of_batch = _mix(_mix(state, self._first), 2**64 - 2)  # no image draws that many
        return {"image": _mix(state, self._rows), "batch": of_batch}

    def _bits(self, per: str, count: int = 1) -> np.ndarray:
        """Return 53 random bits, or `count` times 53, for each row or for the batch."""
        bits = _mix(self._states[check_choice(per, "per", KINDS)], self._calls)
        self._calls += 1
        if count != 1:
            bits = _mix(bits[:, np.newaxis], np.arange(count))
        return bits >> np.uint64(11)

    def _spread(self, numbers: np.ndarray, shape: tuple[int, ...] = ()) -> np.ndarray:
        """Return numbers for each row, in which those for the batch are repeated."""
        return np.broadcast_to(numbers.reshape(-1, *shape), (len(self), *shape))

    def uniform(self, per: str = "image", shape: Shape = ()) -> np.ndarray:
        """Return a float64 in [0, 1) for each row.

        Parameters
        ----------
        per : {"image", "batch"}
            Whether each row has its own number, or all rows of the batch have the same.
        shape : tuple of int, optional
            The shape of the numbers of a row, such as that of an image. By default it is one number.
        """
        shape = check_shape(shape)
        return self._spread(self._bits(per, math.prod(shape)) * 2.0**-53, shape)

    def normal(
        self, loc: float = 0.0, scale: float = 1.0, per: str = "image", shape: Shape = ()
    ) -> np.ndarray:
        """Return a normally distributed float64 for each row.

        Parameters
        ----------
        loc, scale : float
            The mean and the standard deviation.
        per, shape
            As for `uniform`.
        """
        # As Box and Muller: the first number is not 0, of which there is no logarithm.
        radius = np.sqrt(-2 * np.log1p(-self.uniform(per, shape)))
        return loc + scale * radius * np.cos(2 * np.pi * self.uniform(per, shape))

    def permutation(self, n: int, per: str = "image") -> np.ndarray:
        """Return the int64 numbers from 0 to ``n - 1`` in a random order, for each row.

        Parameters
        ----------
        n : int
            At least 1.
        per : {"image", "batch"}
            As for `uniform`.
        """
        n = check_int(n, "n", 1)
        return np.argsort(self.uniform(per, (n,)), axis=-1, kind="stable")

    def choice(self, values: Any, p: Any = None, per: str = "image") -> np.ndarray:
        """Return one of some values for each row.

        Parameters
        ----------
        values : array-like
            One value, or array, along axis 0 for each possibility; or an int `n` for those below.
        p : array-like, optional
            The probability of each of them, which add up to 1. By default they are equal.
        per : {"image", "batch"}
            As for `uniform`.
        """
        values = np.arange(values) if is_int(values) else np.asarray(values)
        if p is None:
            return values[self.integers(len(values), per)]
        p = np.asarray(p, float)
        if p.shape != values.shape[:1] or (p < 0).any() or abs(p.sum() - 1) > 1e-6:
            raise ValueError(f"p: expected {len(values)} probabilities that add up to 1, got {p}")
        chosen = np.searchsorted(np.cumsum(p)[:-1], self.uniform(per), "right")
        return values[chosen]

    def seed(self, per: str = "image") -> np.ndarray:
        """Return an int64 below ``2**31`` for each row, to seed a generator of a library with.

        Parameters
        ----------
        per : {"image", "batch"}
            As for `uniform`.
        """
        return self._spread((self._bits(per) >> np.uint64(22)).astype(np.int64))

    def integers(self, below: int, per: str = "image") -> np.ndarray:
        """Return an int64 from 0 to ``below - 1`` for each row.

        Parameters
        ----------
        below : int
            At least 1.
        per : {"image", "batch"}
            As for `uniform`.
        """
        below = check_int(below, "below", 1)
        return (self.uniform(per) * below).astype(np.int64)
