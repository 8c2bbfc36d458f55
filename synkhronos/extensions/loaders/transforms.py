"""Transforms of images, each for all images of a part of a batch at once.

A transform is any callable ``transform(images, draws)``. It gets an array whose axis 0 has the images,
and returns one of as many images. Its random numbers come from `Draws`. If it draws from other
generators, it is called for each image by itself.
"""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from synkhronos._checks import check_choice, check_extent, check_in_range, check_int
from synkhronos._text import as_call
from synkhronos.extensions.loaders.draws import KINDS, Draws

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
