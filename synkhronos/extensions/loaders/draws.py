"""Random numbers that depend on the seed, the epoch and the row, and on nothing else.

A generator with a state would have to be created for each row. Here a number is a hash of its place, so
the numbers of many rows are computed at once, by any process. The hash is that of SplitMix64 [1]_: the
i-th number of a generator with the state s is ``mix(s + (i + 1) * GAMMA)``. It is applied once for each
part of the place, and the result is the state for the next part.

.. [1] Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
"""

from __future__ import annotations

import numpy as np

from synkhronos._checks import check_choice, check_int

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
        state = _state_of(seed, epoch)
        self._states = _mix(state, rows)
        self._batch = _mix(_mix(state, first), 2**64 - 2)  # no image draws that many
        self._calls = 0

    def __len__(self) -> int:
        return len(self._states)

    def uniform(self, per: str = "image") -> np.ndarray:
        """Return a float64 in [0, 1) for each row.

        Parameters
        ----------
        per : {"image", "batch"}
            Whether each row has its own number, or all rows of the batch have the same.
        """
        states = self._states if check_choice(per, "per", KINDS) == "image" else self._batch
        bits = _mix(states, self._calls)
        self._calls += 1
        return np.broadcast_to((bits >> np.uint64(11)) * 2.0**-53, self._states.shape)

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
