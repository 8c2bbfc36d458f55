"""A place in shared memory through which bytes of any length travel."""


class Box:
    """A place in shared memory for bytes of any length; long ones get a block of their own."""

    def __init__(self, memory, nbytes):
        self._memory = memory
        # The place and length of what is in the box, then room for it.
        block = memory.allocate(16 + nbytes)
        self._header = block[:16].data.cast("q")
        self._start = memory.reference(block)[0] + 16
        self._nbytes = nbytes
        self._short = self._long = None

    def put(self, payload):
        if payload is self._short:  # it is still there
            return
        self._short = self._long = None
        start, nbytes = self._start, len(payload)
        if nbytes > self._nbytes:
            self._long = self._memory.allocate(nbytes)
            start = self._memory.reference(self._long)[0]
        self._memory.mapping[start : start + nbytes] = payload
        self._header[0], self._header[1] = start, nbytes
        if self._long is None:
            self._short = payload

    def clear(self):
        self._long = None

    def get(self):
        start, nbytes = self._header
        return self._memory.mapping[start : start + nbytes]
