"""Numbers that the ranks report: each rank keeps its own, and all ranks can read the latest."""

from __future__ import annotations

import json
import time
from numbers import Real
from typing import Any

import numpy as np

from synkhronos.stores.commons import Commons

_ROOM = 4096  # bytes for the latest report of a rank


class Reports:
    """The reports of a rank, and the latest reports of all ranks.

    Parameters
    ----------
    commons : Commons
    rank, size : int

    Attributes
    ----------
    own : list of dict
        This rank's reports, each with ``"seconds"`` since the start of the program on this rank.
    """

    def __init__(self, commons: Commons, rank: int, size: int) -> None:
        self._rank = rank
        self._locks = commons.locks("reports", size)
        self._latest = commons.array("reports", (size, _ROOM), "uint8")
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
        if len(text) > _ROOM - 2:
            raise ValueError(
                f"rank.report: expected numbers that take at most {_ROOM - 2} bytes with their names, "
                f"got {len(text)}; report fewer at a time"
            )
        self.own.append(report)
        lock = self._locks[self._rank]
        if lock.try_acquire():  # else somebody is reading the last one
            try:
                row = self._latest[self._rank]
                row[2 : 2 + len(text)] = np.frombuffer(text, np.uint8)
                row[:2] = divmod(len(text), 256)
            finally:
                lock.release()

    def latest(self) -> list[dict[str, float] | None]:
        """Return the latest report of each rank; None for a rank that has none, or is writing it."""
        return [self._read(rank) for rank in range(len(self._locks))]

    def _read(self, rank):
        lock = self._locks[rank]
        if not lock.try_acquire():
            return None
        try:
            row = self._latest[rank]
            length = 256 * int(row[0]) + int(row[1])
            return json.loads(row[2 : 2 + length].tobytes()) if length else None
        finally:
            lock.release()
