"""Mailboxes in shared memory, for bytes of any length."""

from __future__ import annotations

import mmap

import numpy as np

from synkhronos.stores.memory import SharedMemory

_HEADER = 16  # bytes


class Mailbox:
    """Bytes in shared memory. Contents that are too long for it get a separate block.

    Parameters
    ----------
    memory : SharedMemory
        Where to allocate it.
    nbytes : int
        The number of bytes for which there is always room.
    place : (mmap, int), optional
        Other memory that the processes share, and the offset there, which are used instead. Separate
        blocks are in `memory` nevertheless.

    Attributes
    ----------
    long : numpy.ndarray or None
        The separate block of long contents; None frees it, when they have been read.
    """

    def __init__(
        self, memory: SharedMemory, nbytes: int, place: tuple[mmap.mmap, int] | None = None
    ) -> None:
        self._memory = memory
        if place is None:
            block = memory.allocate(_HEADER + nbytes)
            place = memory.mapping, memory.offset(block)
            header = block[:_HEADER].data
        else:
            header = memoryview(place[0])[place[1] : place[1] + _HEADER]
        # The offset of a separate block, or 0, and the length of the bytes; then the room for them.
        self._header = header.cast("q")
        self._room, self._start = place[0], place[1] + _HEADER
        self._nbytes = nbytes
        self._short: bytes | None = None  # the contents, if they are in the room
        self.long: np.ndarray | None = None

    def put(self, payload: bytes) -> None:
        """Replace the contents. The same object as last time need not be written again."""
        if payload is self._short:
            return
        self._short = self.long = None
        nbytes = len(payload)
        if nbytes > self._nbytes:
            self.long = block = self._memory.allocate(nbytes)
            start = self._memory.offset(block)
            self._memory.mapping[start : start + nbytes] = payload
            self._header[0], self._header[1] = start, nbytes
        else:
            self._room[self._start : self._start + nbytes] = payload
            self._header[0], self._header[1] = 0, nbytes
            self._short = payload

    def get(self) -> bytes:
        """Return the contents."""
        header = self._header
        start = header[0]
        if start:
            return self._memory.mapping[start : start + header[1]]
        return self._room[self._start : self._start + header[1]]
