"""A mailbox in shared memory, for bytes of any length."""


class Mailbox:
    """Bytes in shared memory. Contents that are too long for it get a separate block.

    Parameters
    ----------
    memory : SharedMemory
    nbytes : int
        The number of bytes for which there is always room.
    """

    def __init__(self, memory, nbytes):
        self._memory, self._mapping = memory, memory.mapping
        # Offset and length of the bytes, then the room for them.
        block = memory.allocate(16 + nbytes)
        self._header = block[:16].data.cast("q")
        self._start = memory.offset(block) + 16
        self._nbytes = nbytes
        self._short = self._long = None

    def put(self, payload):
        """Replace the contents. The same object as last time need not be written again."""
        if payload is self._short:
            return
        self._short = self._long = None
        start, nbytes = self._start, len(payload)
        if nbytes > self._nbytes:
            self._long = self._memory.allocate(nbytes)
            start = self._memory.offset(self._long)
        self._mapping[start : start + nbytes] = payload
        self._header[0], self._header[1] = start, nbytes
        if self._long is None:
            self._short = payload

    def clear(self):
        """Free the block of long contents, after they have been read."""
        self._long = None

    def get(self):
        """Return the contents."""
        header = self._header
        start = header[0]
        return self._mapping[start : start + header[1]]
