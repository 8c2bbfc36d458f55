"""How a command is sent: from the master to the leaders, and from a leader to its machine's ranks.

The same call is often repeated. Then each rank reuses the objects that it sent or received the last
time: nothing is pickled again, and the arrays are received into the same memory, of which the command
may still have views.
"""

from __future__ import annotations

import pickle
from typing import Any, Sequence

import numpy as np

from synkhronos.machines.cached_arrays import COMMAND
from synkhronos.machines.store import Part
from synkhronos.stores.required_rows import Need


class Orders:
    """The last command as one rank has sent or received it.

    Parameters
    ----------
    n_machines : int

    Attributes
    ----------
    received : (tuple, list of numpy.ndarray)
        For a leader that is not the master: the message, and the arrays that came with it.
    parts : list of Part
        What is in these arrays, and in files of this machine.
    """

    def __init__(self, n_machines: int) -> None:
        self.received: tuple[Any, list[np.ndarray]] = None, []
        self.parts: Sequence[Part] = ()
        self._sent = [(COMMAND, b"", [], [])] * n_machines
        self._framed: tuple[tuple, bytes] = ((), (), b""), b""
        self._opened: tuple[bytes, tuple] = b"", ((), (), b"")

    def message(
        self, machine: int, payload: bytes, needed: list[Need], dropped: list
    ) -> tuple[str, bytes, list[Need], list]:
        """Return the message to a leader."""
        _, last_payload, last_needed, last_dropped = self._sent[machine]
        if payload is not last_payload or needed is not last_needed or dropped != last_dropped:
            self._sent[machine] = COMMAND, payload, needed, dropped
        return self._sent[machine]

    def frame(self, payload: bytes, parts: Sequence[Part], dropped: Sequence) -> bytes:
        """Return what the other ranks of a machine receive; empty bytes mean the end of the world."""
        (last_parts, last_dropped, last_payload), framed = self._framed
        if payload is not last_payload or parts is not last_parts or dropped != last_dropped:
            content = parts, dropped, payload
            framed = pickle.dumps(content, pickle.HIGHEST_PROTOCOL) if payload else b""
            self._framed = content, framed
        return framed

    def open(self, framed: bytes) -> tuple[Sequence[Part], Sequence, bytes]:
        """Return the arguments that were given to `frame`."""
        if framed != self._opened[0]:
            self._opened = framed, pickle.loads(framed)
        return self._opened[1]
