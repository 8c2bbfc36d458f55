"""The messages between commands that a leader gets: commands of its world, and orders of the master.

A command comes from another leader, and an order from the master. So a command of a new world may arrive
before the order that starts this world, and one of a broken world after it.
"""

from __future__ import annotations

import pickle
from typing import Any, Callable, NamedTuple

#: In place of the number of a world, in an order of the master and the answer to it
NO_WORLD = -1


class ControlMessage(NamedTuple):
    """A message between commands.

    Attributes
    ----------
    number : int
        The number of the command, or of the last one before an order.
    world : int
        The number of the first command of its world; `NO_WORLD` in an order.
    body : bytes
        The contents.
    following : bytes
        Bytes that follow, which may differ when the same contents are sent again.
    """

    number: int
    world: int
    body: bytes
    following: bytes = b""

    @property
    def is_order(self) -> bool:
        return self.world == NO_WORLD

    def content(self) -> Any:
        """Return the object that an order, or the answer to it, consists of."""
        return pickle.loads(self.body)


class Inbox:
    """Sorts the messages between commands of one leader.

    Parameters
    ----------
    wait : callable
        ``wait()`` waits for the next message and returns it.
    """

    def __init__(self, wait: Callable[[], ControlMessage]) -> None:
        self._wait = wait
        self._postponed: list[ControlMessage] = []  # orders for the loop that starts worlds
        self._early: list[ControlMessage] = []  # commands whose world has not started here

    def postpone(self, order: ControlMessage) -> None:
        """Let the next call return this order."""
        self._postponed.append(order)

    def next_order(self, number: int) -> ControlMessage:
        """Return the next order, between worlds; keep commands after the one with this number."""
        while not (letter := self._next()).is_order:
            if letter.number > number:
                self._early.append(letter)
        return letter

    def next_command(self, world: int, number: int) -> ControlMessage:
        """Return the next command of a world after the one with this number, or an order before it."""
        self._early = [letter for letter in self._early if letter.world >= world]
        for place, letter in enumerate(self._early):
            if letter.world == world:
                return self._early.pop(place)
        while not (letter := self._next()).is_order:
            if letter.world == world and letter.number > number:
                return letter
            if letter.world > world:
                self._early.append(letter)
        return letter

    def _next(self) -> ControlMessage:
        return self._postponed.pop(0) if self._postponed else self._wait()
