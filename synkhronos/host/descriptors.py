"""Giving up the script's pipes, sockets and locked files in a worker, and opening its files again.

A copy of the writing end of a pipe keeps the reader waiting forever, a copy of a socket keeps its port,
and a copy of a locked file keeps the lock, after the script has closed its own. So a worker gives up its
copies. Their numbers stay in use, for the objects that have them; to read or write fails with
``EBADF``. A copy of a file that is read shares its position with the script and with all other workers,
so that two of them read at wrong places. It is opened again, under the same number and at the same
position, also if it is locked. Files that are written to, devices and unnamed resources of libraries are
inherited.

A worker keeps the descriptors of Python's standard streams, the pipes of multiprocessing's own servers,
and those that the user names.

`open_unnamed` makes the files in which the processes of this package share memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
import tempfile
from typing import Any, Iterable, Iterator, Mapping, NamedTuple

from synkhronos.host.handler_errors import reraise_if_handlers

#: The errors that a file cannot be opened, or mapped, for which there is no other way
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_STANDARD = (0, 1, 2)
#: The flags with which a file is opened again
_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_DIRECT


class OpenFile(NamedTuple):
    """What a descriptor refers to: a file, and the position there, if it is a regular file."""

    file: tuple[int, int]
    position: int | None


def descriptors() -> dict[int, OpenFile | None]:
    """Return the file descriptors that are open in this process, and what they refer to."""
    with os.scandir("/proc/self/fd") as entries:
        numbers = [int(entry.name) for entry in entries]
    return {number: _open_file(number) for number in numbers}


def give_up(
    those: Mapping[int, OpenFile | None], kept: Iterable[int] = (), only_reads: bool = False
) -> None:
    """Give up the pipes, sockets and locked files among some descriptors, and open files again.

    Parameters
    ----------
    those : dict
        The `descriptors` of the process from which this process was forked, before. A descriptor that
        refers to another file since then is not given up: it may be a pipe between the two.
    kept : iterable of int
        The descriptors that stay usable.
    only_reads : bool
        Whether files that can also be written to are opened again: this process only reads them.
    """
    kept = {*_STANDARD, *kept, *_of_streams(), *_of_servers()}
    nothing = os.open("/", os.O_PATH)
    try:
        for descriptor, found in those.items():
            if descriptor in kept or found is None or _file(descriptor) != found.file:
                continue
            if not _reopen(descriptor, found.position, only_reads) and _is_shared(descriptor):
                _replace(descriptor, nothing, inheritable=False)
    finally:
        os.close(nothing)


def _reopen(descriptor: int, position: int | None, only_reads: bool) -> bool:
    """Open the file of a descriptor again if it is for reading; return whether it was opened."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    access = flags & os.O_ACCMODE
    if position is None or access == os.O_WRONLY or (access == os.O_RDWR and not only_reads):
        return False
    try:
        opened = os.open(f"/proc/self/fd/{descriptor}", flags & _FLAGS)
    except OSError:  # such as a file that belongs to another user now
        if not only_reads:
            return False
        opened = os.open("/", os.O_PATH)  # an error is better than to read at a wrong place
    else:
        os.lseek(opened, position, os.SEEK_SET)
    try:
        _replace(descriptor, opened, os.get_inheritable(descriptor))
    finally:
        os.close(opened)
    return True


def _replace(descriptor: int, other: int, inheritable: bool) -> None:
    try:
        os.dup2(other, descriptor, inheritable)
    except OSError:  # the limit of numbers was set after it had been opened
        os.close(descriptor)


def _open_file(descriptor: int) -> OpenFile | None:
    file = _file(descriptor)
    if file is None:
        return None
    try:
        is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return OpenFile(file, os.lseek(descriptor, 0, os.SEEK_CUR) if is_regular else None)
    except OSError:  # a path only, or closed meanwhile
        return OpenFile(file, None)


def _file(descriptor: int) -> tuple[int, int] | None:
    """Identify the file of a descriptor; None if it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_shared(descriptor: int) -> bool:
    """Whether its file stays in use as long as any process has a copy."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return _is_locked(descriptor)
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _is_locked(descriptor: int) -> bool:
    # Locks of `fcntl` belong to a process, and are not inherited.
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{descriptor}") as file:
        return any(line.startswith("lock:") and "FLOCK" in line for line in file)
    return False


def _of_streams() -> Iterator[int]:
    """The descriptors that printing uses."""
    for stream in (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):  # a replacement of a stream may raise anything
            yield stream.fileno()  # type: ignore[union-attr]


def _of_servers() -> Iterator[int]:
    """The pipes to the servers of multiprocessing, if they are used."""
    for name, server, pipe in (
        ("resource_tracker", "_resource_tracker", "_fd"),
        ("forkserver", "_forkserver", "_forkserver_alive_fd"),
    ):
        module = sys.modules.get(f"multiprocessing.{name}")
        found = getattr(getattr(module, server, None), pipe, None)
        if found is not None:
            yield found


def open_unnamed(label: str, can_be_sealed: bool = False) -> Any:
    """Return a new file without a name, in memory if possible."""
    try:
        flags = os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if can_be_sealed else 0)
        return open(os.memfd_create(label, flags), "r+b", buffering=0)
    except (AttributeError, OSError) as error:
        reraise_if_handlers(error)
        # An old kernel or C library, or a sandbox that forbids the call
        if isinstance(error, OSError) and error.errno in FULL:
            raise
        return tempfile.TemporaryFile(prefix="synkhronos-", buffering=0)
