"""Mailboxes in shared memory: for bytes of any length, and for the short replies of many ranks."""

from __future__ import annotations

import mmap
from typing import Sequence

import numpy as np

from synkhronos.stores.memory import SharedMemory

_HEADER = 16  # bytes
_WORDS = 16  # of 8 bytes for each rank: two cache lines. The first is the number of bytes of the reply
_START = 8
#: The bytes of the longest reply that is here
ROOM = 8 * _WORDS - _START
_ELSEWHERE = -1


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


class Replies:
    """A short reply of each rank; longer ones are in mailboxes.

    Parameters
    ----------
    memory : SharedMemory
        Where to allocate it.
    boxes : list of Mailbox
        One for each rank.
    """

    def __init__(self, memory: SharedMemory, boxes: Sequence[Mailbox]) -> None:
        self._boxes = boxes
        self._block = memory.allocate(8 * _WORDS * len(boxes))
        self._room = memory.mapping
        self._first = memory.offset(self._block)
        self._stop = self._first + 8 * _WORDS * len(boxes)
        self._lengths = self._block.data.cast("q")
        self._starts = range(_START, self._stop - self._first, 8 * _WORDS)

    def put(self, rank: int, payload: bytes) -> None:
        """Replace the reply of a rank."""
        nbytes = len(payload)
        if nbytes > ROOM:
            self._boxes[rank].put(payload)
            self._lengths[_WORDS * rank] = _ELSEWHERE
        else:
            start = self._first + self._starts[rank]
            self._room[start : start + nbytes] = payload
            self._lengths[_WORDS * rank] = nbytes

    def get(self) -> list[bytes]:
        """Return the replies of all ranks."""
        block = self._room[self._first : self._stop]
        lengths = memoryview(block).cast("q")[::_WORDS].tolist()
        replies = [block[start : start + nbytes] for start, nbytes in zip(self._starts, lengths)]
        if _ELSEWHERE in lengths:
            for rank, nbytes in enumerate(lengths):
                if nbytes == _ELSEWHERE:
                    replies[rank] = self._boxes[rank].get()
        return replies
