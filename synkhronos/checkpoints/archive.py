"""Arrays and a description in one ``.npz`` file, which is replaced atomically and never trusted.

Reading: nothing is unpickled or decompressed, every size is checked before memory is allocated, and
every byte is checked against the checksum in the zip file.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import zipfile
from types import TracebackType
from typing import IO, Any, BinaryIO, Callable, Iterable, Iterator, Literal

import numpy as np

from synkhronos._typing import PathLike
from synkhronos.checkpoints.replacing import replacing
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.host.signals import DeferredSignals

_DESCRIPTION = "synkhronos.json"
_LONGEST_HEADER = 1000  # bytes of the header of an array, with its dtype and shape
_PIECE = 16 << 20


def write(path: PathLike, description: Any, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write a file. An existing file of this name is unchanged until the new file is complete.

    Parameters
    ----------
    path : str or path-like
        The file to write.
    description : object
        A value that JSON can represent.
    arrays : iterable of (str, numpy.ndarray)
        Names and arrays. Each pair is requested after the previous pair has been written.
    """
    with replacing(path) as file:
        try:
            _write(file, description, arrays)
        except ValueError as error:
            reraise_if_handlers(
                error
            )  # if it comes before the block of a member, `zipfile` cannot close the file
            raise


def _write(file: BinaryIO, description: Any, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    with _zip_file(file, "w") as archive:
        with archive.open(_member(_DESCRIPTION), "w") as member:
            member.write(json.dumps(description).encode())
        for name, array in arrays:
            with archive.open(_member(f"{name}.npy"), "w", force_zip64=True) as member:
                contiguous = np.asarray(array, order="C")
                np.lib.format.write_array(member, contiguous, (1, 0), allow_pickle=False)


def _zip_file(file: BinaryIO, mode: Literal["r", "w"] = "r") -> zipfile.ZipFile:
    archive = None
    try:
        with DeferredSignals():  # `zipfile` drops or converts any OSError here
            archive = zipfile.ZipFile(file, mode)
        return archive
    except BaseException:
        if archive is not None:
            archive.close()
        raise


def _member(name: str) -> zipfile.ZipInfo:
    """Return a zip entry without a date, so that the same contents give the same bytes."""
    member = zipfile.ZipInfo(name)
    member.external_attr = 0o600 << 16
    return member


class Reader:
    """An open file that was written by `write`.

    Attributes
    ----------
    description : object
        The argument of `write`.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        Also by `read`, if the file is damaged or was not written by `write`.
    """

    def __init__(self, path: PathLike) -> None:
        self._path = path = os.fsdecode(path)
        with DeferredSignals():  # `isfile` takes any OSError for an answer
            is_file = os.path.isfile(path)
        if not is_file:
            raise FileNotFoundError(f"there is no file {self._path!r}")
        self._file = open(path, "rb")
        try:
            with self.interpreting():
                self._archive = _zip_file(self._file)
                self.description = json.loads(self._archive.read(self._stored(_DESCRIPTION)))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._archive.close()
        self._file.close()

    @contextlib.contextmanager
    def interpreting(self) -> Iterator[None]:
        """Convert any exception in the block to a ``ValueError`` that names the file."""
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            reraise_if_handlers(error)
            raise ValueError(
                f"{self._path!r} is damaged, or is not a checkpoint written by synk.save(): "
                f"{type(error).__name__}: {error}"
            ) from error

    def read(
        self, name: str, empty: Callable[[tuple[int, ...], np.dtype], np.ndarray] = np.empty
    ) -> np.ndarray:
        """Return an array, read into the memory that ``empty(shape, dtype)`` returns."""
        with self.interpreting():
            entry = self._stored(f"{name}.npy")
            with self._archive.open(entry) as member:
                shape, dtype = _read_header(member)
                if entry.file_size - member.tell() != math.prod(shape) * dtype.itemsize:
                    raise ValueError(f"array {name} is not as long as its shape {shape}")
                array = empty(shape, dtype)
                _fill(array, member)
                return array

    def _stored(self, name: str) -> zipfile.ZipInfo:
        """Return an uncompressed entry, after checking that it is no longer than the file."""
        entry = self._archive.getinfo(name)
        as_it_is = entry.compress_type == zipfile.ZIP_STORED
        size = os.fstat(self._file.fileno()).st_size
        if not as_it_is or not entry.compress_size == entry.file_size <= size:
            raise ValueError(f"{name} is not stored as it was written")
        return entry


def _read_header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and dtype. NumPy parses the header only if its length is harmless."""
    start = member.read(10)
    length = int.from_bytes(start[8:], "little")
    if start[:8] != b"\x93NUMPY\x01\x00" or length > _LONGEST_HEADER:
        raise ValueError("an array's header is not as it was written")
    header = io.BytesIO(start[8:] + member.read(length))
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(header)
    if fortran_order or dtype.kind not in "biufc":
        raise ValueError(f"an array is not as it was written: {dtype}, Fortran order {fortran_order}")
    return shape, dtype


def _fill(array: np.ndarray, member: IO[bytes]) -> None:
    """Read the bytes of an array and verify their checksum."""
    flat = array.reshape(-1).view(np.uint8)
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE]
        if member.readinto(piece) != len(piece):  # type: ignore[attr-defined]  # a `ZipExtFile`
            raise EOFError("the file ends too early")
    member.read(1)
