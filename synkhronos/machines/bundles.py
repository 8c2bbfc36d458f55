"""A message for the machines of a subtree: some bytes for all of them, and some for each.

It can be taken apart without unpickling anything: a leader sends each child the parts for the child's
subtree. Bytes that change when a call is repeated are not in it, but follow it; it knows how many of
them belong to each machine.
"""

from __future__ import annotations

import itertools
import struct
from typing import Sequence

KEPT = 1 << 16  # bytes of a message that is kept in case it is sent or comes again

_COUNT = struct.Struct("=I")


class Bundle:
    """The contents of such a message.

    Parameters
    ----------
    common : bytes
        For all machines.
    parts : list of bytes
        For each machine, by their numbers.
    following : list of int, optional
        How many of the bytes that follow the message belong to each machine, by default none.
    """

    def __init__(self, common: bytes, parts: Sequence[bytes], following: Sequence[int] = ()) -> None:
        self.common, self.parts = common, parts
        self.following = following or [0] * len(parts)

    def pack(self) -> bytes:
        """Return the message."""
        numbers = len(self.parts), len(self.common), *map(len, self.parts), *self.following
        table = struct.pack(f"={len(numbers)}I", *numbers)
        return b"".join([table, self.common, *self.parts])

    @classmethod
    def unpack(cls, message: bytes) -> Bundle:
        """Return the contents of a message of `pack`."""
        [count] = _COUNT.unpack_from(message)
        table = struct.Struct(f"={2 * count + 2}I")
        _, common, *lengths = table.unpack_from(message)
        ends = list(itertools.accumulate(lengths[:count], initial=table.size + common))
        parts = [message[start:end] for start, end in zip(ends, ends[1:])]
        return cls(message[table.size : table.size + common], parts, lengths[count:])

    def part_of(self, machines: slice) -> Bundle:
        """Return what is for consecutive machines."""
        return Bundle(self.common, self.parts[machines], self.following[machines])

    def place_of(self, machines: slice) -> slice:
        """Return where the bytes that belong to consecutive machines are in those that follow."""
        ends = list(itertools.accumulate(self.following, initial=0))
        return slice(ends[machines.start], ends[machines.stop])
