"""Memory of the script that every process of the machine can map, also those that exist already.

It is a file without a name: nothing can be left behind in ``/dev/shm``. While the process that made it
has it open, the processes of the same user can open it by a path in ``/proc``. So a ``numpy.memmap`` of
it is not copied into a `Data`: the ranks map it themselves.
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

import numpy as np

from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.stores.memory import check_memory
from synkhronos.stores.named_memory import open_unnamed


class MappedMemory:
    """Zeroed memory that other processes can map by its path.

    Parameters
    ----------
    nbytes : int
        The size. The pages are allocated at once, so that a lack of memory is an error here, and does
        not end the process that writes to them.
    label : str
        A name for lists of the files that a process has open.

    Attributes
    ----------
    path : str
        Where other processes of this machine open it, until `close`.
    array : numpy.memmap
        All of it, of dtype uint8. Its views stay valid after `close`, but their contents are zero.

    Raises
    ------
    MemoryError
        If there is too little memory.
    """

    def __init__(self, nbytes: int, label: str) -> None:
        check_memory(nbytes)
        self._file = open_unnamed(label)
        number = self._file.fileno()
        try:
            os.posix_fallocate(number, 0, nbytes)
        except OSError as error:
            reraise_if_handlers(error)
            self._file.close()
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            raise MemoryError(f"shared memory: {nbytes} bytes were requested: {error}") from error
        self.path = f"/proc/{os.getpid()}/fd/{number}"
        self.array = map_memory(self.path)

    def close(self) -> None:
        """Return the pages to the system. Other processes cannot map it any more."""
        if self._file.closed:
            return
        mapping: Any = self.array._mmap  # type: ignore[attr-defined]
        mapping.madvise(mmap.MADV_REMOVE)
        self._file.close()


def map_memory(path: str) -> np.memmap:
    """Return the memory that another process of this machine, or this one, has at a path.

    Raises
    ------
    OSError
        If there is none: it was closed, or its process has ended or runs on another machine.
    """
    return np.memmap(path, np.uint8, "r+")
