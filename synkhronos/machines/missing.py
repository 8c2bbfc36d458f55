"""Leaders that have ended a command without coming to a meeting at which others still wait.

A leader says so only if it is asked: one that has waited for a while asks all others, once in each
meeting. So a command in which all ranks do the same needs no further message.
"""

from __future__ import annotations

from typing import Callable

ASK, ENDED = "ask", "ended"  # notices

AFTER = 0.01  # seconds of waiting after which a leader asks


class Absent:
    """What a leader knows of others that have ended the command, and has told them.

    Parameters
    ----------
    notify : callable
        ``notify(kind, passed, to)`` sends a notice to the leaders `to`, by default to all.
    """

    def __init__(self, notify: Callable[..., None]) -> None:
        self._notify = notify
        self.begin()

    def begin(self) -> None:
        """Start a command."""
        self._own: int | None = None  # how many meetings this leader has passed, once it has ended
        self._asked: int | None = None  # in which meeting this leader has asked
        self._asking: dict[int, int] = {}  # by leader: how many meetings it has passed
        self._ended: dict[int, int] = {}

    def ask(self, passed: int) -> None:
        """Ask the others whether they come to the meeting after the first `passed`."""
        if self._asked != passed:
            self._asked = passed
            self._notify(ASK, passed)

    def end(self, passed: int) -> None:
        """Note that this leader has ended the command, and has passed so many meetings."""
        self._own = passed
        for machine, others in self._asking.items():
            self._answer(machine, others)

    def take(self, kind: str, machine: int, passed: int) -> None:
        """Take a notice of another leader."""
        if kind == ENDED:
            self._ended[machine] = passed
        else:
            self._asking[machine] = passed
            if self._own is not None:
                self._answer(machine, passed)

    def _answer(self, machine, passed):
        if self._own <= passed:
            self._notify(ENDED, self._own, [machine])

    def find(self, passed: int) -> int | None:
        """Return a leader that does not come to the meeting after the first `passed`, or None."""
        return next((one for one, others in self._ended.items() if others <= passed), None)
