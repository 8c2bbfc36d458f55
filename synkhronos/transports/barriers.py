"""How far each rank has come in a command, in memory that all ranks share.

Each rank writes to a cache line of its own, with the number of the command. So nothing has to be reset
before the next command, and a short command takes no time for memory that another core has written to.
"""

from __future__ import annotations

from typing import Collection, Sequence

from synkhronos.host.status import BEGUN as _BEGUN
from synkhronos.host.status import FINISHED as _FINISHED
from synkhronos.host.status import LINE as _LINE
from synkhronos.host.status import NONE as _NONE
from synkhronos.host.status import PASSED as _PASSED
from synkhronos.host.status import REACHED as _REACHED
from synkhronos.host.status import REACHED_IN as _REACHED_IN
from synkhronos.host.status import StatusPage

_ALL = 1 << 62  # more barriers than there are in any command


class BarrierProgress:
    """The barriers that each rank has reached, and whether the command was aborted.

    Parameters
    ----------
    page : StatusPage
        Their memory, which other processes can read.
    """

    def __init__(self, page: StatusPage) -> None:
        self._lines = page.lines
        self._size = len(page.lines) // _LINE
        self._finished = page.lines[_FINISHED::_LINE]
        self._command = page.command  # the number of the last command
        self._aborted = page.aborted  # first barrier affected, from 1; 0 for none
        for rank in range(self._size):
            self.forget(rank)

    def begin(self) -> None:
        """Record that a new command begins, in which no rank has reached anything."""
        self._command[0] += 1

    @property
    def number(self) -> int:
        """The number of the last command."""
        return self._command[0]

    def begin_on(self, rank: int) -> None:
        """Record that a rank has begun the command, and has started the ranks below it in a tree."""
        self._lines[rank * _LINE + _BEGUN] = self._command[0]

    def has_begun(self, rank: int) -> bool:
        """Whether a rank of a tree has recorded that."""
        return self._lines[rank * _LINE + _BEGUN] == self._command[0]

    def forget(self, rank: int) -> None:
        """Record that a rank has not reached anything: another process has its place."""
        line = rank * _LINE
        self._lines[line + _FINISHED] = self._lines[line + _REACHED_IN] = _NONE

    def reach(self, rank: int, barrier: int) -> None:
        """Record that a rank has reached a barrier; they are counted from 1."""
        line = rank * _LINE
        self._lines[line + _REACHED] = barrier
        self._lines[line + _REACHED_IN] = self._command[0]

    def finish(self, rank: int, passed: int) -> None:
        """Record that a rank has finished the command, and how many barriers it has passed."""
        line = rank * _LINE
        self._lines[line + _PASSED] = passed
        self._lines[line + _FINISHED] = self._command[0]

    def has_finished(self, rank: int) -> bool:
        """Whether a rank has finished the command."""
        return self._lines[rank * _LINE + _FINISHED] == self._command[0]

    def all_finished(self) -> bool:
        """Whether all ranks have finished the command."""
        return self._finished.tolist().count(self._command[0]) == self._size

    @property
    def aborted(self) -> int:
        """The first barrier at which the command is aborted; 0 if it is not."""
        return self._aborted[0]

    def abort(self, barrier: int) -> None:
        """Record that no rank can pass this barrier; 0 for the next command."""
        self._aborted[0] = barrier

    def missing(self, passed: int) -> list[int]:
        """Return the ranks that have finished without reaching the barrier after the first `passed`."""
        return [
            rank
            for rank in range(self._size)
            if self.has_finished(rank) and self._lines[rank * _LINE + _PASSED] <= passed
        ]

    def describe_late(self, without: Collection[int], labels: Sequence[int]) -> str:
        """Name the ranks, except some, that have reached the fewest barriers."""
        reached = {other: self._reached(other) for other in range(self._size) if other not in without}
        first = min(reached.values())
        doing = "computing" if first == 0 else f"after barrier {first} of the command"
        behind = [other for other in reached if reached[other] == first]
        return ", ".join(f"rank {labels[other]} (running, {doing})" for other in behind)

    def _reached(self, rank: int) -> int:
        """Return how many barriers a rank has reached."""
        if self.has_finished(rank):
            return _ALL
        line = rank * _LINE
        return self._lines[line + _REACHED] if self._lines[line + _REACHED_IN] == self._command[0] else 0
