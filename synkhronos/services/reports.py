"""Numbers that each rank shows to all ranks, and the latest of its reports.

The latest report of a rank is in one of two places, to which the rank writes alternately, so no reader
waits and no report is lost. A checksum tells a reader which places are complete.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from numbers import Real
from typing import Any

import numpy as np

from synkhronos.stores.named_memory import NamedMemory

#: Arrays in the named memory with a number for each rank, which only the rank itself sets: its clock,
#: how often it was replaced, and whether it has ended its program
CLOCKS, RESTARTS, ENDED = NUMBERS = "clocks", "restarts", "ended"

_ROOM = 4094  # bytes for a report
_HEAD = struct.Struct("=qHI")  # its number, the length, and the checksum of number and text
_NUMBER = struct.Struct("=q")
_MOST_READS = 100  # attempts, for a rank that writes all the time


class LatestReports:
    """The memory of the latest reports of all ranks.

    Parameters
    ----------
    named memory : Commons
        Where they are.
    size : int
        The number of ranks.
    """

    def __init__(self, named_memory: NamedMemory, size: int) -> None:
        places = named_memory.array("reports", (size, 2, _HEAD.size + _ROOM), "uint8")
        self._places = [[place.data for place in of_rank] for of_rank in places]

    def write(self, rank: int, number: int, text: bytes) -> None:
        """Write a report of a rank. The numbers of its reports increase from 1."""
        place = self._places[rank][number % 2]
        place[_HEAD.size : _HEAD.size + len(text)] = text
        # Not by `pack_into`, which sets it to zero first, as if nothing had been written
        place[: _HEAD.size] = _HEAD.pack(number, len(text), _checksum(number, text))

    def read(self, rank: int) -> tuple[int, bytes]:
        """Return the number and the text of the latest report of a rank; ``(0, b"")`` if it has none."""
        for _ in range(_MOST_READS):
            found, n_written = [(0, b"")], 0
            for place in self._places[rank]:
                number, length, checksum = _HEAD.unpack_from(place, 0)
                text = bytes(place[_HEAD.size : _HEAD.size + length])
                n_written += bool(number)
                if number and checksum == _checksum(number, text):
                    found.append((number, text))
            # If a place is being written, the other may have become outdated since it was read.
            if len(found) > n_written:
                break
        return max(found, key=lambda one: one[0])


class Reports:
    """The reports of a rank, and the latest reports of all ranks.

    Parameters
    ----------
    named memory : Commons
        Where they are.
    rank, size : int
        This rank, and the number of ranks.

    Attributes
    ----------
    own : list of dict
        This rank's reports, each with ``"seconds"`` since the start of the program on this rank.
    """

    def __init__(self, named_memory: NamedMemory, rank: int, size: int) -> None:
        self._latest, self._rank, self._size = LatestReports(named_memory, size), rank, size
        self._number = self._latest.read(rank)[0]  # of a rank that died
        self._began = time.perf_counter()
        self.own: list[dict[str, float]] = []

    def add(self, numbers: dict[str, Any]) -> None:
        """Report numbers by name."""
        if not numbers:
            raise TypeError("rank.report: expected numbers by name, as report(loss=0.5), got nothing")
        report = {"seconds": time.perf_counter() - self._began}
        for name, number in numbers.items():
            if isinstance(number, np.ndarray) and number.ndim == 0:
                number = number.item()
            if not isinstance(number, Real):
                raise TypeError(f"rank.report: {name}: expected a number, got {number!r}")
            report[name] = float(number)
        text = json.dumps(report).encode()
        if len(text) > _ROOM:
            raise ValueError(
                f"rank.report: expected numbers that take at most {_ROOM} bytes with their names, got "
                f"{len(text)}; report fewer at a time"
            )
        self.own.append(report)
        self._number += 1
        self._latest.write(self._rank, self._number, text)

    def latest(self) -> list[dict[str, float] | None]:
        """Return the latest report of each rank; None for a rank that has none."""
        texts = [self._latest.read(rank)[1] for rank in range(self._size)]
        return [json.loads(text) if text else None for text in texts]


def _checksum(number: int, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(_NUMBER.pack(number)))
