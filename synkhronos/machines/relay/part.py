"""How the parts of a relay send to their counterparts on other machines."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Sequence

import numpy as np

from synkhronos.machines.leaders import END_OF_TAGS
from synkhronos.machines.links import Links
from synkhronos.stores.named_memory import NamedMemory

_FIRST_TAG, _TAGS = END_OF_TAGS, 2  # progress processes also meet as leaders do
_NUMBERS = 1 << 20


class RelayLinks:
    """Messages between the parts of the relays of all machines.

    Parameters
    ----------
    links : Links
        The links between the progress processes.
    number : int
        The number of the program.
    """

    def __init__(self, links: Links, number: int) -> None:
        self._links = links
        self._tag = _FIRST_TAG + _TAGS * (number % _NUMBERS)

    def send(self, to: int, part: str, *content: Any) -> None:
        """Send to the same part on another machine."""
        self._links.send(to, self._tag, pickle.dumps((part, content), pickle.HIGHEST_PROTOCOL))

    def receive(self) -> tuple[int, str, tuple[Any, ...]] | None:
        """Return the machine, the part and the content of the next message; None if there is none."""
        received = self._links.receive(None, self._tag)
        if received is None:
            return None
        return (received[0], *pickle.loads(received[1]))

    def send_piece(self, to: int, piece: np.ndarray) -> None:
        """Start to send memory, which must not change until it has arrived."""
        self._links.send(to, self._tag + 1, piece)

    def receive_piece(self, source: int) -> np.ndarray | None:
        """Return the next piece from a machine, or None."""
        received = self._links.receive(source, self._tag + 1)
        return None if received is None else np.frombuffer(received[1], np.uint8)

    def discard(self) -> None:
        """Forget all that has arrived."""
        self._links.discard(self._tag)
        self._links.discard(self._tag + 1)


class RelayContext(NamedTuple):
    """The objects with which the parts of the relay of a machine work.

    Attributes
    ----------
    named memory : Commons
        The named memory of the machine.
    links : RelayLinks
        The messages to other machines.
    machine : int
        The number of the machine.
    machines : list of range
        The ranks of each machine.
    """

    named_memory: NamedMemory
    links: RelayLinks
    machine: int
    machines: Sequence[range]

    @property
    def own(self) -> range:
        """The ranks of this machine."""
        return self.machines[self.machine]

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return sum(map(len, self.machines))

    @property
    def others(self) -> list[int]:
        """The other machines."""
        return [machine for machine in range(len(self.machines)) if machine != self.machine]

    def machine_of(self, rank: int) -> int:
        """Return the machine of a rank."""
        return next(machine for machine, ranks in enumerate(self.machines) if rank in ranks)


class RelayPart(ABC):
    """A part of the relay of one machine."""

    name: str

    def __init__(self, context: RelayContext) -> None:
        self.context, self.named_memory, self.links = context, context.named_memory, context.links

    @abstractmethod
    def look(self) -> bool:
        """Send the changes of this machine; return whether anything was done."""

    @abstractmethod
    def take(self, source: int, *content: Any) -> None:
        """Handle a message of the same part on another machine."""
