"""Arrays and a description in one ``.npz`` file, which is replaced atomically and never trusted.

Reading: nothing is unpickled or decompressed, every size is checked before memory is allocated, and
every byte is checked against the checksum in the zip file.

The new file is written next to the old file. A process that is killed before it replaces the old file
leaves an unfinished file. Its lock is then released, so the next writer recognizes the file as a
leftover and removes it.

Links are followed, so that a link to a checkpoint stays a link. In a folder such as ``/tmp``, however,
anybody can create a link to a file of someone else. Such links are refused, as Linux does with
``fs.protected_symlinks``, which does not apply to a program that follows links by itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import math
import os
import re
import stat
import zipfile
from typing import IO, Any, BinaryIO, Callable, Iterable, Iterator, Literal

import numpy as np

from synkhronos._typing import PathLike
from synkhronos.host.handler_errors import reraise_if_handlers, suppress
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
            # If it comes before the block of a member, `zipfile` cannot close the file.
            reraise_if_handlers(error)
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

    def __exit__(self, *error: object) -> None:
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


_MOST_LINKS = 40  # as in Linux
_LONGEST_STEM = 100  # bytes; unfinished files have 29 more


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` at the end of the block; an error leaves nothing behind.

    The mode of the file that is replaced is kept, and so are its owner and group if this user may set
    them. A file that did not exist gets the mode of the umask.
    """
    path = target(path)
    folder, name = os.path.split(path)
    with DeferredSignals():  # `os.path` takes any OSError for an answer
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"there is no folder {folder!r} for the file {name!r}")
        former = os.stat(path) if os.path.exists(path) else None
    if former is not None and stat.S_ISDIR(former.st_mode):
        raise IsADirectoryError(f"expected the name of a file, got the folder {path!r}")
    if former is not None and not stat.S_ISREG(former.st_mode):  # root would replace it with a file
        raise OSError(f"expected the name of a file, got a device, pipe or socket: {path!r}")
    _remove_leftovers(folder, name)
    unfinished, file = _make_unfinished(folder, name, 0o666 if former is None else 0o600)
    try:
        with file:
            yield file
            file.flush()
            if former is not None:
                _keep_access(file.fileno(), former)
            os.fsync(file.fileno())
            os.replace(unfinished, path)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(unfinished)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            reraise_if_handlers(error)
            raise _not_written(error.errno, path, former is not None) from None
        raise
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the new name must be on disk, too
    finally:
        os.close(descriptor)


def _not_written(number: int, path: str, exists: bool) -> OSError:
    """Return the error of a file that could not be written, such as on a full disk."""
    state = "the file there is unchanged" if exists else "no file is left there"
    return OSError(number, f"{os.strerror(number)}; nothing was written, and {state}", path)


def target(path: PathLike) -> str:
    """Return the absolute path without links, which is the file that is replaced.

    Parameters
    ----------
    path : str or path-like
        The path that the script has given.

    Raises
    ------
    PermissionError
        If another user has created the file, or one of the links, in a folder for everybody.
    """
    done, n_links = "/", 0
    left = os.path.join(os.getcwd(), os.fsdecode(path)).split("/")[::-1]
    while left:
        part = left.pop()
        if part in ("", ".", ".."):
            done = os.path.dirname(done) if part == ".." else done
            continue
        entry = os.path.join(done, part)
        try:
            mode = os.lstat(entry).st_mode
        except FileNotFoundError:
            mode = 0
        if mode and not stat.S_ISDIR(mode):
            _check_owner(entry)
        if not stat.S_ISLNK(mode):
            done = entry
            continue
        n_links += 1
        if n_links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fsdecode(path))
        link = os.readlink(entry)
        done = "/" if link.startswith("/") else done
        left += link.split("/")[::-1]
    return done


def _check_owner(path: str) -> None:
    """Raise ``PermissionError`` if another user has created this in a folder for everybody."""
    folder, created = os.stat(os.path.dirname(path)), os.lstat(path)
    for_everybody = stat.S_ISVTX | stat.S_IWOTH
    if folder.st_mode & for_everybody != for_everybody:
        return
    if created.st_uid not in (os.geteuid(), folder.st_uid):
        kind = "link" if stat.S_ISLNK(created.st_mode) else "file"
        raise PermissionError(
            f"expected a path that no other user controls, got the {kind} {path!r} of the user with the "
            f"number {created.st_uid}, in a folder in which everybody can create files; give a path in "
            f"a folder of your own"
        )


def _keep_access(descriptor: int, former: os.stat_result) -> None:
    """Give a file the mode of the former file, and its owner and group if possible."""
    new, mode = os.fstat(descriptor), former.st_mode & 0o777
    if (new.st_uid, new.st_gid) != (former.st_uid, former.st_gid):
        for owner in (former.st_uid, -1):
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, owner, former.st_gid)
                break
    new = os.fstat(descriptor)
    if new.st_gid != former.st_gid:
        mode &= ~0o070  # this was for the members of another group
    if stat.S_IMODE(new.st_mode) != mode:
        os.fchmod(descriptor, mode)


def _stem(name: str) -> str:
    """Return how the names of unfinished files begin, which may not be longer than names may be."""
    encoded = os.fsencode(name)
    short = name if len(encoded) <= _LONGEST_STEM else hashlib.sha256(encoded).hexdigest()
    return f".{short}."


def _make_unfinished(folder: str, name: str, mode: int) -> tuple[str, BinaryIO]:
    """Create a new file and hold its lock while it is open."""
    while True:
        path = os.path.join(folder, f"{_stem(name)}{os.urandom(8).hex()}.unfinished")
        file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode), "w+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:  # another writer is about to remove it as a leftover
            reraise_if_handlers(error)
            file.close()
            continue
        except OSError as error:  # a file system without locks: leftovers are not removed
            reraise_if_handlers(error)
            return path, file
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()


def _remove_leftovers(folder: str, name: str) -> None:
    pattern = re.escape(_stem(name)) + r"[0-9a-f]{16}\.unfinished"
    for entry in os.listdir(folder):
        if re.fullmatch(pattern, entry):
            path = os.path.join(folder, entry)
            with suppress(OSError):
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                finally:
                    os.close(descriptor)
