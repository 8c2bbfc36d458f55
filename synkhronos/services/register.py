"""A register in the commons: bytes that one process writes, and another one reads, without locks.

The writer may die at any time, and its replacement may then write to the register while it is being
read. A checksum tells the reader whether it has read complete contents. If not, the reader can sleep,
because the writer wakes it when it is done.
"""

from __future__ import annotations

import struct
import time
import zlib

from synkhronos.stores.commons import Commons

_HEAD = struct.Struct("=qqqI")  # the number, the time, the length, and the checksum of number and bytes
_LEAST_ROOM = 1 << 10  # bytes


class Register:
    """Numbered bytes of any length. There is room for the latest only.

    Parameters
    ----------
    commons : Commons
    name : str
        The name by which both processes know it.
    """

    def __init__(self, commons: Commons, name: str) -> None:
        self._commons, self._name = commons, name
        self._head = commons.array(f"{name} head", _HEAD.size, "uint8").data
        self._rooms: dict[int, memoryview] = {}

    def write(self, number: int, data: bytes) -> None:
        """Replace the contents. `number` must be larger than all earlier numbers."""
        self._room(len(data))[: len(data)] = data
        _HEAD.pack_into(self._head, 0, number, time.monotonic_ns(), len(data), _checksum(number, data))

    def label(self) -> tuple[int, int]:
        """Return the number, initially 0, and when it was written, in nanoseconds."""
        return _HEAD.unpack_from(self._head)[:2]

    def read(self) -> tuple[int, bytes] | None:
        """Return the number and the bytes, or None if they are not complete."""
        number, _, length, checksum = _HEAD.unpack_from(self._head)
        if not number or length < 0:
            return None
        data = bytes(self._room(length)[:length])
        return (number, data) if checksum == _checksum(number, data) else None

    def _room(self, length):
        """Return memory for this many bytes."""
        nbytes = max(_LEAST_ROOM, 1 << (length - 1).bit_length())
        if nbytes not in self._rooms:
            self._rooms[nbytes] = self._commons.array(f"{self._name} of {nbytes}", nbytes, "uint8").data
        return self._rooms[nbytes]


def _checksum(number, data):
    return zlib.crc32(data, number & 0xFFFFFFFF)
