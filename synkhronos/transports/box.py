"""A mailbox in shared memory, for bytes of any length."""


class Box:
    """Bytes in shared memory; those that are too long for it get a block of their own.

    Parameters
    ----------
    memory : SharedMemory
    nbytes : int
        What there is always room for.
    """

    def __init__(self, memory, nbytes):
        self._memory = memory
        # Offset and length of the bytes, then room for them.
        block = memory.allocate(16 + nbytes)
        self._header = block[:16].data.cast("q")
        self._start = memory.offset(block) + 16
        self._nbytes = nbytes
        self._short = self._long = None

    def put(self, payload):
        """Replace the contents; the very object that was put last is still there."""
        if payload is self._short:
            return
        self._short = self._long = None
        start, nbytes = self._start, len(payload)
        if nbytes > self._nbytes:
            self._long = self._memory.allocate(nbytes)
            start = self._memory.offset(self._long)
        self._memory.mapping[start : start + nbytes] = payload
        self._header[0], self._header[1] = start, nbytes
        if self._long is None:
            self._short = payload

    def clear(self):
        """Free the block of long contents, once they have been read."""
        self._long = None

    def get(self):
        """Return the contents."""
        start, nbytes = self._header
        return self._memory.mapping[start : start + nbytes]
