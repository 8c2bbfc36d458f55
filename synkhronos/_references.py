"""Where an array of a `Data` lies, in shared memory or in a file, and how a rank comes by it."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from synkhronos._here import Here
from synkhronos._typing import Reference

_MOST_FILES = 64  # that a rank keeps mapped


def locate_in_file(value: Any) -> Reference | None:
    """Return a reference to where a ``numpy.memmap`` lies in its file, or None if it is not there.

    Copy-on-write mappings, and views that are not C-contiguous or not aligned, have no such place.
    """
    if not isinstance(value, np.memmap) or value.filename is None or value.mode == "c":
        return None
    mapping = value._mmap  # type: ignore[attr-defined]
    if mapping is None or not value.flags.c_contiguous or not value.flags.aligned:
        return None
    start = value.offset - value.offset % mmap.ALLOCATIONGRANULARITY
    first = np.frombuffer(mapping, np.uint8).ctypes.data
    offset = start + value.ctypes.data - first
    filename = os.fspath(value.filename)
    try:
        status = os.stat(filename)
    except OSError:  # removed: no other rank can open it
        return None
    if not _is_open(status):  # another file has taken its name
        return None
    which = status.st_dev, status.st_ino, status.st_ctime_ns
    return "file", filename, value.dtype.str, value.shape, offset, which


def _is_open(status):
    """Whether this process has a file open; a mapping keeps its file open."""
    for number in os.listdir("/dev/fd"):
        try:
            if os.path.samestat(os.fstat(int(number)), status):
                return True
        except OSError:  # the one that the list was read from
            continue
    return False


def open_reference(here: Here, reference: Reference) -> np.ndarray:
    """Return the array of a `Data`'s reference, on any rank, without a copy."""
    if reference[0] != "file":
        return here.memory.open(reference)
    if reference not in here.files:
        if len(here.files) >= _MOST_FILES:
            here.files.clear()
        here.files[reference] = _map_file(*reference[1:])
    return here.files[reference]


def _map_file(filename, dtype, shape, offset, which):
    """Map a file by its name, and make sure that it is the one which the master has mapped."""
    # Opening a named pipe, put in the file's place, would block without the flag.
    with open(filename, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if (status.st_dev, status.st_ino) != which[:2]:
            raise OSError(
                f"Data of a numpy.memmap: another file has taken the place of {filename} since it was "
                f"mapped; call set_value() with a memmap of the new one"
            )
        return np.memmap(file, dtype, "r", offset, shape).view(np.ndarray)
