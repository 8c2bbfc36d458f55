"""Transforms of images, with random numbers that depend on the seed, the epoch and the row only.

A generator with a state would have to be created for each row. Here a number is a hash of its place, so
the numbers of many rows are computed at once, by any process. The hash is that of SplitMix64 [1]_: the
i-th number of a generator with the state s is ``mix(s + (i + 1) * GAMMA)``. It is applied once for each
part of the place, and the result is the state for the next part.

.. [1] Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from synkhronos._checks import check_choice, check_extent, check_in_range, check_int, check_shape, is_int
from synkhronos._text import as_call
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


Transform = Callable[[np.ndarray, Draws], np.ndarray]


class RandomCrop:
    """Takes a window from each image, at a random place.

    Parameters
    ----------
    size : int or (int, int)
        The height and the width of the window.
    padding : int, default: 0
        The number of zeros that are first put at each side of the last two axes.
    per : {"image", "batch"}
        Whether each image has its own place, or all images of a batch have the same.
    """

    def __init__(self, size: int | tuple[int, int], padding: int = 0, per: str = "image") -> None:
        self._size = _pair(size)
        self._padding = check_extent(padding, "RandomCrop: padding")
        self._per = check_choice(per, "RandomCrop: per", KINDS)

    def __repr__(self) -> str:
        return as_call(self, {"size": self._size, "padding": self._padding, "per": self._per})

    def __call__(self, images: np.ndarray, draws: Draws) -> np.ndarray:
        if self._padding:
            sides = [(0, 0)] * (images.ndim - 2) + [(self._padding, self._padding)] * 2
            images = np.pad(images, sides)
        room = _room(images, self._size)
        top, left = (draws.integers(extent, self._per) for extent in room)
        windows: Any = sliding_window_view(images, self._size, axis=(-2, -1))  # type: ignore[call-overload]  # the hint is wrong
        # The windows of an image are at axes -4 and -3.
        windows = np.moveaxis(windows, (-4, -3), (1, 2))
        return windows[np.arange(len(images)), top, left]


class CenterCrop:
    """Takes the window in the middle of each image, as for validation.

    Parameters
    ----------
    size : int or (int, int)
        The height and the width of the window.
    """

    def __init__(self, size: int | tuple[int, int]) -> None:
        self._size = _pair(size)

    def __repr__(self) -> str:
        return as_call(self, {"size": self._size})

    def __call__(self, images: np.ndarray, draws: Draws) -> np.ndarray:
        top, left = ((room - 1) // 2 for room in _room(images, self._size))
        height, width = self._size
        return images[..., top : top + height, left : left + width]


class Mirror:
    """Reverses the last axis of some images, at random.

    Parameters
    ----------
    per : {"image", "batch"}
        Whether it is decided for each image, or for all images of a batch at once.
    probability : float, default: 0.5
        The probability of a reversal.
    """

    def __init__(self, per: str = "image", probability: float = 0.5) -> None:
        self._per = check_choice(per, "Mirror: per", KINDS)
        self._probability = check_in_range(probability, "Mirror: probability", 0, 1)

    def __repr__(self) -> str:
        return as_call(self, {"per": self._per, "probability": self._probability})

    def __call__(self, images: np.ndarray, draws: Draws) -> np.ndarray:
        chosen = draws.uniform(self._per) < self._probability
        if chosen.all():
            return images[..., ::-1]
        if chosen.any():
            images = images.copy()
            images[chosen] = images[chosen][..., ::-1]
        return images


class Normalize:
    """Subtracts a mean, and divides by a standard deviation.

    Without a mean and a standard deviation, those of the image itself are used, or of the whole batch.

    Parameters
    ----------
    mean, std : array-like, optional
        A number, one number per channel (axis 1 of the images), or an array with the shape of an image,
        such as the mean image of the data. Give both or neither; `std` may be 1.
    per : {"image", "batch"}
        Without `mean` and `std`: of what they are computed. For a batch, a single process loads all of
        its rows; in a program, it is the rank's share of the batch.
    epsilon : float, default: 1e-8
        Added to a computed standard deviation.
    dtype : dtype, default: "float32"
        The dtype of the result.
    """

    def __init__(
        self,
        mean: Any = None,
        std: Any = None,
        per: str = "image",
        epsilon: float = 1e-8,
        dtype: Any = "float32",
    ) -> None:
        if (mean is None) != (std is None):
            raise ValueError("Normalize: expected both mean and std, or neither of them")
        self._dtype = np.dtype(dtype)
        self._mean = None if mean is None else np.asarray(mean, self._dtype)
        self._scale = None if std is None else 1 / np.asarray(std, self._dtype)
        self._epsilon = check_in_range(epsilon, "Normalize: epsilon", 0)
        self._per = check_choice(per, "Normalize: per", KINDS)
        #: Whether it needs all rows of a batch at once
        self.needs_whole_batch = mean is None and per == "batch"

    def __call__(self, images: np.ndarray, draws: Draws) -> np.ndarray:
        result = np.array(images, self._dtype, order="C")  # always a copy
        if self._mean is None or self._scale is None:
            axes = tuple(range(0 if self._per == "batch" else 1, images.ndim))
            result -= result.mean(axes, keepdims=True)
            result /= result.std(axes, keepdims=True) + np.asarray(self._epsilon, self._dtype)
            return result
        result -= _per_channel(self._mean, images.ndim)
        result *= _per_channel(self._scale, images.ndim)
        return result


def needs_whole_batch(transform: Any) -> bool:
    """Whether a transform needs all rows of a batch at once."""
    return bool(getattr(transform, "needs_whole_batch", False))


def _per_channel(values: np.ndarray, ndim: int) -> np.ndarray:
    """Return values for each channel in a form that NumPy combines with images of this ndim."""
    return values.reshape(-1, *[1] * (ndim - 2)) if values.ndim == 1 and ndim > 2 else values


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    height, width = size if isinstance(size, (tuple, list)) and len(size) == 2 else (size, size)
    return check_int(height, "size", 1), check_int(width, "size", 1)


def _room(images: np.ndarray, size: tuple[int, int]) -> tuple[int, int]:
    """Return how many places a window has in each of the last two axes."""
    extents = images.shape[-2:] if images.ndim > 2 else ()
    if len(extents) != 2 or extents[0] < size[0] or extents[1] < size[1]:
        raise ValueError(
            f"loading: expected images of at least {size[0]} x {size[1]} pixels in their last two axes, "
            f"got an array of {images.shape}"
        )
    return extents[0] - size[0] + 1, extents[1] - size[1] + 1
