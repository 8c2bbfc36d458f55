"""A mailbox in shared memory, for bytes of any length."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from synkhronos.stores.memory import SharedMemory


class Mailbox:
    """Bytes in shared memory. Contents that are too long for it get a separate block.

    Parameters
    ----------
    memory : SharedMemory
        Where to allocate it.
    nbytes : int
        The number of bytes for which there is always room.
    """

    def __init__(self, memory: SharedMemory, nbytes: int) -> None:
        self._memory, self._mapping = memory, memory.mapping
        # Offset and length of the bytes, then the room for them.
        block = memory.allocate(16 + nbytes)
        self._header = block[:16].data.cast("q")
        self._start = memory.offset(block) + 16
        self._nbytes = nbytes
        self._short: bytes | None = None  # the contents, if they are in the room
        self._long: np.ndarray | None = None  # the separate block

    def put(self, payload: bytes) -> None:
        """Replace the contents. The same object as last time need not be written again."""
        if payload is self._short:
            return
        self._short = self._long = None
        start, nbytes = self._start, len(payload)
        if nbytes > self._nbytes:
            self._long = block = self._memory.allocate(nbytes)
            start = self._memory.offset(block)
        self._mapping[start : start + nbytes] = payload
        self._header[0], self._header[1] = start, nbytes
        if self._long is None:
            self._short = payload

    def clear(self) -> None:
        """Free the block of long contents, after they have been read."""
        self._long = None

    def get(self) -> bytes:
        """Return the contents."""
        header = self._header
        start = header[0]
        return self._mapping[start : start + header[1]]
