"""Images in memory or in files, scaled to squares; and rows of words."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import numpy as np


class Rows:
    """Rows of words.

    Parameters
    ----------
    rows : int32 matrix
        Numbers of words; 0 is padding.
    labels : vector of int
        The class of each row.
    """

    def __init__(self, rows: np.ndarray, labels: np.ndarray) -> None:
        self.rows, self.labels = rows, np.asarray(labels, "int32")

    def load(self, rows: np.ndarray, pixels: int | None = None) -> np.ndarray:
        """Return the rows with these numbers."""
        return self.rows[rows]


class ArrayImages:
    """Images in memory.

    Parameters
    ----------
    images : uint8 array
        Rows, channels, height, width.
    labels : vector of int
        The class of each image.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        if len(images) != len(labels):
            raise ValueError(f"expected a label for each of {len(images)} images, got {len(labels)}")
        self.images, self.labels = images, np.asarray(labels, "int32")

    def load(self, rows: np.ndarray, pixels: int | None = None) -> np.ndarray:
        """Return images with values from 0 to 1, scaled to this height and width."""
        return resized(self.images[rows].astype("float32") / 255, pixels)

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the deviation of each channel."""
        counts = np.stack([np.bincount(self.images[:, channel].ravel(), minlength=256)
                           for channel in range(self.images.shape[1])])  # fmt: skip
        shares, values = counts / counts.sum(axis=1, keepdims=True), np.arange(256) / 255
        mean = shares @ values
        deviation = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(axis=1))
        return mean.astype("float32"), deviation.astype("float32")


class ImageFiles:
    """Image files, which are read when they are used.

    Parameters
    ----------
    paths : list of path
        Files in a format that Pillow reads.
    labels : vector of int
        The class of each file.
    """

    def __init__(self, paths: Sequence[Path], labels: np.ndarray) -> None:
        self.paths, self.labels = list(paths), np.asarray(labels, "int32")

    def load(self, rows: np.ndarray, pixels: int | None = None) -> np.ndarray:
        """Return the middle squares of images, scaled to this height, with values from 0 to 1."""
        return np.stack([self.load_one(row, pixels or 224) for row in rows])

    def load_one(self, row: int, pixels: int) -> np.ndarray:
        """Return one image: channels, height, width.

        Raises
        ------
        ValueError
            If the file cannot be read as an image.
        """
        from PIL import ImageOps
        from PIL.Image import open as open_image

        size = (pixels, pixels)
        try:
            with open_image(self.paths[row]) as image:
                image.draft("RGB", size)  # JPEG then decodes only the pixels that are needed
                found = np.asarray(ImageOps.fit(image.convert("RGB"), size), "float32")
        except Exception as error:  # Pillow's decoders raise many different exceptions
            raise ValueError(f"{self.paths[row]} cannot be read as an image: {error}") from error
        return found.transpose(2, 0, 1) / 255


def read_images(paths: Sequence[Path]) -> np.ndarray:
    """Return color images of one size as an array of bytes: rows, channels, height, width."""
    from PIL.Image import open as open_image

    found = []
    for path in paths:
        with open_image(path) as image:
            found.append(np.asarray(image.convert("RGB")).transpose(2, 0, 1))
    return np.stack(found)


def resized(images: np.ndarray, pixels: int | None) -> np.ndarray:
    """Return images that are scaled to another height and width by linear interpolation.

    To fewer pixels, the average of all pixels below a triangle is taken, whose base is two pixels of the
    result. Pillow's filter ``BILINEAR`` does the same.
    """
    if pixels is None or images.shape[2:] == (pixels, pixels):
        return images
    vertical, horizontal = (interpolation(side, pixels) for side in images.shape[2:])
    return np.asarray(vertical @ images @ horizontal.T, images.dtype)


def interpolation(old: int, new: int) -> np.ndarray:
    """Return the matrix that scales a line of `old` pixels to `new` pixels; each row has the sum 1."""
    step = old / new
    reach = max(step, 1)  # of the triangle, to each side
    centers = (np.arange(new) + 0.5) * step
    distances = np.abs(np.arange(old) + 0.5 - centers[:, None]) / reach
    weights = np.maximum(1 - distances, 0)
    return (weights / weights.sum(axis=1, keepdims=True)).astype("float32")
