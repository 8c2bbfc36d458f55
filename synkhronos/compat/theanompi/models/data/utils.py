"""``theanompi.models.data.utils``: batches that are divided among ranks, and parts of images (c01b)."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from synkhronos.extensions.session.inforec import read_arrays


def unpickle(path: str) -> dict[str, Any]:
    """Return what a file of CIFAR-10 or CIFAR-100 for Python contains: arrays, numbers and strings.

    Unlike any pickle, a file with anything else cannot run code.

    Raises
    ------
    ValueError
        If the file contains anything else, or is damaged.
    """
    return read_arrays(path)


def get_bad_list(n_batches: int, commsize: int) -> list[int]:
    """Return the last batches, from the end, that are too few for all ranks."""
    return list(range(n_batches - 1, n_batches - 1 - n_batches % commsize, -1))


def extend_data(
    rank: int, size: int, img_batches: list[Any], label_batches: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Repeat the last batches, so that all ranks get the same number.

    Parameters
    ----------
    rank, size : int
        This rank, and the number of ranks.
    img_batches, label_batches : list
        The batches; labels without images are left out.

    Returns
    -------
    list, list
        New lists, whose length is a multiple of `size`.
    """
    images, labels = list(img_batches), list(label_batches[: len(img_batches)])
    missing = -len(images) % size
    if missing > len(images):
        raise ValueError(f"extend_data: expected at least {missing} batches, got {len(images)}")
    if missing:
        images, labels = images + images[-missing:], labels + labels[-missing:]
    return images, labels


def get_rand3d(rand_crop: bool, mode: str) -> np.ndarray:
    """Return where to cut, as two parts of the margin, and whether to mirror, 0 or 1.

    It is the middle without mirroring, unless `rand_crop` is true, and `mode` is not ``"val"``.
    """
    if not rand_crop or mode == "val":
        return np.array([0.5, 0.5, 0], "float32")
    draws = np.random.rand(3).astype("float32")
    draws[2] = round(float(draws[2]))
    return draws


def get_params_crop_and_mirror(
    param_rand: Sequence[float] | np.ndarray, data_shape: Sequence[int], cropsize: int
) -> tuple[int, int, bool]:
    """Return the first line, the first column, and whether to mirror, from what `get_rand3d` returns."""
    margin = (data_shape[2] - cropsize) // 2
    first, second = (int(round(float(item) * margin * 2)) for item in param_rand[:2])
    return first, second, bool(round(float(param_rand[2])))


def crop_and_mirror(
    data: np.ndarray, mode: str, rand_crop: bool, flag_batch: bool = True, cropsize: int = 227
) -> np.ndarray:
    """Return a part of each image, which may be mirrored.

    Parameters
    ----------
    data : numpy.ndarray
        Images: channels, height, width, batch.
    mode, rand_crop
        As in `get_rand3d`.
    flag_batch : bool
        Whether one choice is made for all images, and not for each. The middle is the same for all.
    cropsize : int
        The height and width of the part.

    Returns
    -------
    numpy.ndarray of float32
        Of shape (channels, cropsize, cropsize, batch).
    """
    choice = get_rand3d(rand_crop, mode)
    if flag_batch or np.array_equal(choice, [0.5, 0.5, 0]):
        return np.ascontiguousarray(_cut(data, choice, cropsize), dtype="float32")
    generator = np.random.RandomState(int(10000 * choice[1]))
    cut = np.empty((data.shape[0], cropsize, cropsize, data.shape[3]), "float32")
    for number in range(data.shape[3]):
        cut[..., number] = _cut(data[..., number : number + 1], generator.rand(3), cropsize)[..., 0]
    return cut


def _cut(images: np.ndarray, choice: np.ndarray, size: int) -> np.ndarray:
    row, column, mirror = get_params_crop_and_mirror(choice, images.shape, size)
    if mirror:
        images = images[:, :, ::-1]
    return images[:, row : row + size, column : column + size]
