"""Sources: where the rows are read from."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Container, Iterator, Sequence, Union

import numpy as np

from synkhronos._checks import check_int
from synkhronos._errors import SynkhronosError
from synkhronos._text import listed, shortened

PathLike = Union[str, "os.PathLike[str]"]

#: The names of the array in a file of hickle; the second is that of hickle before version 3.
_OF_HICKLE = ("data", "data_0")
#: Modes and formats of Pillow that have 16 bits, although the mode is one of 32
_OF_16_BITS = (("I", "PNG"), ("I", "PPM"))
_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


class UnreadableError(SynkhronosError):
    """Rows that cannot be read. A source raises it in `Source.read`.

    Parameters
    ----------
    name : str
        The name of the file, or of the rows.
    reason : object
        Why it cannot be read.
    """

    def __init__(self, name: str, reason: object) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Source(ABC):
    """Rows that can be read by number. Derive a class from it to read from something else.

    The processes of a loader have copies of the source. What it opens when it first reads, each of them
    has for itself. Files that the script has open each process reads at a position of its own; pipes,
    sockets and connections to databases have to be opened in `read`.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def read(self, rows: np.ndarray) -> Sequence[np.ndarray]:
        """Return rows in the given order: one or several arrays, which have them on axis 0.

        Parameters
        ----------
        rows : numpy.ndarray of int64
            Row numbers, at least one.

        Raises
        ------
        UnreadableError
            If any of the rows cannot be read.
        """

    def name(self, row: int) -> str:
        """Return how messages call a row, such as its file."""
        return f"row {row}"

    def order(self, generator: np.random.Generator) -> np.ndarray:
        """Return all row numbers in a random order, for an epoch."""
        return generator.permutation(len(self))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} rows>"


class Arrays(Source):
    """Arrays in memory or in ``.npy`` files, which are mapped and not read as a whole.

    Parameters
    ----------
    *arrays : array-like or path
        Arrays with the same number of rows, or files of ``numpy.save``.
    """

    def __init__(self, *arrays: Any) -> None:
        self._arrays = [_opened(array) for array in arrays]
        lengths = {len(array) for array in self._arrays}
        if len(lengths) != 1:
            found = listed([str(array.shape) for array in self._arrays]) or "none"
            raise ValueError(f"Arrays: expected arrays with the same number of rows, got {found}")

    def __len__(self) -> int:
        return len(self._arrays[0])

    def read(self, rows: np.ndarray) -> list[np.ndarray]:
        return [array[rows] for array in self._arrays]


class HDF5(Source):
    """Datasets of an HDF5 file; they need h5py.

    Rows that follow each other in the file are read at once. If the file is compressed, `block` rows
    that are shuffled together save much time.

    Parameters
    ----------
    path : path
        The file.
    *names : str
        The names of datasets with the same number of rows.
    block : int, default: 1
        The rows of an epoch are shuffled in blocks of this many successive rows.
    """

    def __init__(self, path: PathLike, *names: str, block: int = 1) -> None:
        self._path, self._names = os.fspath(path), names
        self._block = check_int(block, "HDF5: block", 1)
        self._file: Any = None
        self._missing: dict[str, list[tuple[str, int, int]]] = {}  # parts of virtual datasets
        if not names:
            raise ValueError("HDF5: expected the name of at least one dataset")
        try:
            lengths = {name: len(self._datasets()[number]) for number, name in enumerate(names)}
        except KeyError as error:
            raise ValueError(f"HDF5: expected datasets of {self._path}, got {names}: {error}") from error
        finally:
            self._close()
        if len(set(lengths.values())) != 1:
            raise ValueError(f"HDF5: expected datasets with the same number of rows, got {lengths}")
        self._length = lengths[names[0]]

    def __len__(self) -> int:
        return self._length

    def _datasets(self) -> list[Any]:
        import h5py

        if self._file is None:
            self._file = h5py.File(self._path, "r")
        return [self._file[name] for name in self._names]

    def read(self, rows: np.ndarray) -> list[np.ndarray]:
        try:
            datasets = self._datasets()
            for name, dataset in zip(self._names, datasets):
                if dataset.is_virtual:
                    self._check_parts(name, dataset, rows)
            return [_read_along(item, rows, 0) for item in datasets]
        except OSError as error:
            raise UnreadableError(f"{self._path}, {_range_of(rows)}", error) from error

    def _check_parts(self, name: str, dataset: Any, rows: np.ndarray) -> None:
        """Raise if rows of a virtual dataset are in a file that is missing: HDF5 reads zeros instead."""
        if name not in self._missing:
            self._missing[name] = list(_missing_parts(dataset, self._path))
        for file, first, last in self._missing[name]:
            missing = rows[(rows >= first) & (rows <= last)]
            if len(missing):
                reason = f"{file}, which has these rows of the dataset {name!r}, is missing"
                raise UnreadableError(f"{self._path}, {_range_of(missing)}", reason)

    def name(self, row: int) -> str:
        return f"{self._path}, row {row}"

    def order(self, generator: np.random.Generator) -> np.ndarray:
        return _blocks_in_order(generator, np.arange(0, self._length, self._block), self._length)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._missing = {}


class HickleBatches(Source):
    """Files of hickle with a batch of images each, as Theano-MPI and theano_alexnet prepare them.

    A file has the images of a batch in an array of (channels, height, width, images) or, with
    ``axis=0``, of (images, channels, height, width). The files may have different numbers of images.
    They are shuffled, and not the images in them. h5py reads them; hickle itself is not needed.

    Parameters
    ----------
    files : path or list of paths
        A folder, whose files ``*.hkl`` are taken in the order of their names, or the files.
    labels : array-like or path, optional
        The labels of all images, in the order of the files, or a file of ``numpy.save``.
    axis : int, default: -1
        The axis of the images.
    """

    def __init__(self, files: PathLike | Sequence[PathLike], labels: Any = None, axis: int = -1) -> None:
        if isinstance(files, (str, os.PathLike)):
            files = sorted(Path(files).glob("*.hkl"))
        self._files, self._axis = [os.fspath(item) for item in files], check_int(axis, "axis")
        if not self._files:
            raise ValueError("HickleBatches: expected at least one file *.hkl")
        self._lengths, self._image = self._measure()
        self._starts = np.cumsum([0, *self._lengths[:-1]])
        self._length = sum(self._lengths)
        self._labels = None if labels is None else _opened(labels)
        if self._labels is not None and len(self._labels) < self._length:
            raise ValueError(
                f"HickleBatches: expected a label for each of {self._length} images, got "
                f"{len(self._labels)}"
            )

    def __len__(self) -> int:
        return self._length

    def _measure(self) -> tuple[list[int], tuple[Any, ...]]:
        """Return the number of images in each file, and the shape and dtype of an image."""
        import h5py

        found: list[Any] = []
        for path in self._files:
            try:
                file = h5py.File(path, "r")
            except FileNotFoundError:
                raise
            except OSError:  # it cannot be read, so its rows cannot
                found.append(None)
                continue
            with file:
                found.append(_size(_of_hickle(file, path, self._axis), self._axis))
        if not any(found):
            raise UnreadableError(self._files[0], "none of the files can be read")
        full, image = next(filter(None, found))
        for path, size in zip(self._files, found):
            if size and size[1] != image:
                raise ValueError(
                    f"HickleBatches: expected images with the shape and dtype {image} of the first "
                    f"file, got {size[1]} in {path}"
                )
        lengths = [size[0] if size else full for size in found]
        if None in found and {*lengths[:-1]} - {full}:
            broken = self._files[found.index(None)]
            raise UnreadableError(broken, "how many images it has is unknown, as the others differ")
        return lengths, image

    def read(self, rows: np.ndarray) -> list[np.ndarray]:
        import h5py

        numbers = np.searchsorted(self._starts, rows, "right") - 1
        images = np.empty((len(rows), *self._image[0]), self._image[1])
        for number in np.unique(numbers):
            chosen = np.flatnonzero(numbers == number)
            path = self._files[number]
            try:
                with h5py.File(path, "r") as file:
                    dataset = _of_hickle(file, path, self._axis)
                    expected = self._lengths[number], self._image
                    if _size(dataset, self._axis) != expected:
                        raise ValueError(
                            f"expected {expected} as the number, shape and dtype of its images, got "
                            f"{_size(dataset, self._axis)}"
                        )
                    inside = rows[chosen] - self._starts[number]
                    images[chosen] = _read_along(dataset, inside, self._axis)
            except (OSError, KeyError, ValueError) as error:
                raise UnreadableError(path, error) from error
        return [images] if self._labels is None else [images, self._labels[rows]]

    def name(self, row: int) -> str:
        number = int(np.searchsorted(self._starts, row, "right")) - 1
        return f"{self._files[number]}, image {row - int(self._starts[number])}"

    def order(self, generator: np.random.Generator) -> np.ndarray:
        return _blocks_in_order(generator, self._starts, self._length)


class ImageFolder(Source):
    """Images in folders, one folder for each class; they need Pillow.

    The classes are the folders in the order of their names, and an image's label is the number of its
    folder, an int32. Images are read as RGB, as arrays of (3, height, width) of dtype uint8. Gray images
    of 16 bits are divided by 256; images of floats, and of integers with more bits, cannot be read.

    Parameters
    ----------
    folder : path
        The folder that has the folders of the classes.
    size : int, optional
        The smaller side is scaled to this many pixels, and the middle of the other side is taken. By
        default images are taken as they are, and must have equal sizes.

    Attributes
    ----------
    classes : list of str
        The names of the folders.
    files : list of str
        The files of all images, by row.
    labels : numpy.ndarray of int32
        The labels of all images, by row.
    """

    def __init__(self, folder: PathLike, size: int | None = None) -> None:
        self._size = None if size is None else check_int(size, "ImageFolder: size", 1)
        found = files_by_class(folder, _SUFFIXES)
        self.classes, counts = list(found), list(map(len, found.values()))
        self.files = [os.fspath(item) for files in found.values() for item in files]
        self.labels = np.repeat(np.arange(len(found), dtype=np.int32), counts)
        if not self.files:
            raise ValueError(
                f"ImageFolder: expected images in the folders of {os.fspath(folder)}, got none; each "
                f"class needs a folder, and the names of images end with one of {listed(_SUFFIXES)}"
            )

    def __len__(self) -> int:
        return len(self.files)

    def read(self, rows: np.ndarray) -> list[np.ndarray]:
        images = [self._decoded(self.files[row]) for row in rows]
        for image, row in zip(images, rows):
            if image.shape != images[0].shape:
                raise ValueError(
                    f"ImageFolder: expected images of equal sizes, got {images[0].shape[1:]} and, in "
                    f"{self.files[row]}, {image.shape[1:]}; give a size, to which they are scaled"
                )
        return [np.stack(images), self.labels[rows]]

    def _decoded(self, path: str) -> np.ndarray:
        from PIL.Image import Resampling
        from PIL.Image import open as open_image
        from PIL.ImageOps import fit

        try:
            with open_image(path) as file:
                image = _of_8_bits(file).convert("RGB")
                if self._size is not None and image.size != (self._size, self._size):
                    image = fit(image, (self._size, self._size), Resampling.BILINEAR)
                return np.moveaxis(np.asarray(image), -1, 0)
        except MemoryError:
            raise
        except Exception as error:  # the decoders of the formats raise many kinds
            raise UnreadableError(path, error) from error

    def name(self, row: int) -> str:
        return self.files[row]


def _of_8_bits(image: Any) -> Any:
    """Return an image of Pillow with 8 bits per channel; `convert` would clip it at 255."""
    from PIL.Image import fromarray

    if image.mode not in ("I", "F") and not image.mode.startswith("I;"):
        return image
    pixels = np.asarray(image)
    if not image.mode.startswith("I;16") and (image.mode, image.format) not in _OF_16_BITS:
        raise ValueError(
            f"expected pixels of at most 16 bits, got {pixels.dtype} from {pixels.min()} to "
            f"{pixels.max()}, for which black and white are unknown; save it with 8 bits per channel"
        )
    return fromarray((pixels.astype(np.int64) >> 8).astype(np.uint8))


def as_source(given: Any) -> Source:
    """Return a source: itself, or one of an array, a path of an ``.npy`` file, or several of these."""
    if isinstance(given, Source):
        return given
    if isinstance(given, (tuple, list)):
        return Arrays(*given)
    if isinstance(given, (np.ndarray, str, os.PathLike)):
        return Arrays(given)
    raise TypeError(f"Loader: source: expected a Source, an array or a path, got {given!r}")


def files_by_class(folder: PathLike, suffixes: Container[str]) -> dict[str, list[Path]]:
    """Return the files with these suffixes below each folder in a folder, by its name."""
    return {
        part.name: [
            path
            for path in sorted(part.rglob("*"))
            if path.suffix.lower() in suffixes and path.is_file()
        ]
        for part in sorted(Path(folder).iterdir())
        if part.is_dir()
    }


def _opened(given: Any) -> Any:
    """Return an array, or the mapping of a file of ``numpy.save``."""
    opened = np.load(given, mmap_mode="r") if isinstance(given, (str, os.PathLike)) else given
    array = opened if isinstance(opened, np.ndarray) else np.asarray(opened)
    if array.ndim == 0 or array.dtype.kind not in "biufc":
        got = shortened(given)
        if isinstance(opened, np.ndarray):
            got = f"one of {array.dtype} with the shape {array.shape}"
        raise ValueError(
            f"loading: expected an array of numbers with rows, got {got}; of a file of savez, give the "
            f"arrays, and of times or structures, numbers, such as times.astype('int64')"
        )
    return array


def _range_of(rows: np.ndarray) -> str:
    return f"rows {rows.min()} to {rows.max()}" if len(rows) > 1 else f"row {rows[0]}"


def _blocks_in_order(generator: np.random.Generator, starts: np.ndarray, length: int) -> np.ndarray:
    """Return the rows of blocks, which begin at these rows, with the blocks in a random order."""
    stops = np.append(starts[1:], length)
    lengths = stops - starts
    order = generator.permutation(len(starts))
    # Within a block, row numbers increase by 1.
    begins = np.cumsum(lengths[order]) - lengths[order]
    return np.repeat(starts[order] - begins, lengths[order]) + np.arange(length)


def _read_along(dataset: Any, rows: np.ndarray, axis: int) -> np.ndarray:
    """Return rows of a dataset of h5py along an axis, moved to axis 0.

    They are read in ascending order, each run of successive rows at once.
    """
    axis %= dataset.ndim
    order = np.argsort(rows, kind="stable")
    shape = [*dataset.shape[:axis], len(rows), *dataset.shape[axis + 1 :]]
    ascending = np.empty(shape, dataset.dtype)
    before, numbers = (slice(None),) * axis, rows[order]
    ends = [int(end) for end in np.flatnonzero(np.diff(numbers) != 1) + 1]
    for place, stop in zip([0, *ends], [*ends, len(rows)]):
        source = slice(int(numbers[place]), int(numbers[stop - 1]) + 1)
        dataset.read_direct(ascending, (*before, source), (*before, slice(place, stop)))
    result = np.empty((len(rows), *shape[:axis], *shape[axis + 1 :]), dataset.dtype)
    result[order] = np.moveaxis(ascending, axis, 0)
    return result


def _missing_parts(dataset: Any, path: str) -> Iterator[tuple[str, int, int]]:
    """Yield the missing files of a virtual dataset, with the first and the last row of each."""
    import h5py

    folders = [*os.environ.get("HDF5_VDS_PREFIX", "").split(":"), os.path.dirname(path), ""]
    for part in dataset.virtual_sources():
        if part.file_name == "." or "%" in part.file_name + part.dset_name:
            continue  # the same file, or a pattern for any number of files
        first, last = part.vspace.get_select_bounds()
        # HDF5 looks for a relative name, and for the last part of a name that it does not find.
        names = [part.file_name, *(os.path.join(folder, part.file_name) for folder in folders)]
        names += [os.path.join(folder, os.path.basename(part.file_name)) for folder in folders]
        for name in names:
            if os.path.isfile(name) and h5py.is_hdf5(name):
                with h5py.File(name, "r") as file:
                    if part.dset_name in file:
                        break
        else:
            yield part.file_name, int(first[0]), int(last[0])


def _size(dataset: Any, axis: int) -> tuple[int, tuple[Any, ...]]:
    """Return the number of images in a dataset, and the shape and dtype of an image."""
    shape = [*dataset.shape]
    return shape.pop(axis), (tuple(shape), dataset.dtype.str)


def _of_hickle(file: Any, path: str, axis: int) -> Any:
    """Return the dataset of a file of hickle that is an array."""
    import h5py

    name = next((item for item in _OF_HICKLE if item in file), None)
    found = file[name] if name else None
    if isinstance(found, h5py.Dataset) and found.dtype.kind in "biufc" and found.shape:
        if -found.ndim <= axis < found.ndim:
            return found
        got = f"an array of {found.shape}, which has no axis {axis}"
    elif found is None:
        got = f"a file with {listed(list(file)) or 'nothing'}"
    elif isinstance(found, h5py.Group):
        got = "a list or a dictionary, which hickle stores as a group"
    else:
        got = f"a single value of dtype {found.dtype}" if found.shape == () else f"{found.dtype} values"
    raise ValueError(
        f"HickleBatches: {path}: expected an array of numbers named {' or '.join(_OF_HICKLE)}, got {got}"
    )
