"""Messages to ranks of other machines.

A rank puts a message for any rank into a mailbox on its own machine. The courier takes what is there for
ranks of another machine, and offers it to the courier there. This one accepts it if the real mailbox has
room; otherwise the message stays where it is, so that the sender's mailbox becomes full as well.
"""

from __future__ import annotations

import collections
import math
import time
from typing import Any, Iterator

import numpy as np

from synkhronos.programs.bells import find_bells
from synkhronos.programs.mailbox import Mailbox, Taken
from synkhronos.programs.messages import BELLS, box_of
from synkhronos.programs.relay.post import Part, Place

_RETRY = 2e-3  # seconds after which a message is offered again
_PATIENCE = 1.0  # seconds without room after which a mailbox counts as one that nobody reads


class _Sending:
    """A message to a rank of another machine.

    Attributes
    ----------
    taken : Taken
    pieces : list of int or None
        The numbers of its pieces, once it was accepted.
    """

    def __init__(self, taken: Taken) -> None:
        self.taken = taken
        self.pieces: list[int] | None = None


class _Expected:
    """A message that was accepted for a rank of this machine.

    Attributes
    ----------
    left : int
        How many bytes have not arrived.
    """

    def __init__(self, box: Mailbox, rank: int, slot: int, nbytes: int) -> None:
        self._box, self._slot = box, slot
        self.rank, self.left = rank, nbytes
        self._pieces: Iterator[np.ndarray] = box.pieces(slot, nbytes)

    def add(self, piece: np.ndarray) -> None:
        next(self._pieces)[...] = piece
        self.left -= piece.size
        if not self.left:
            self._box.publish(self._slot)


class Boxes(Part):
    """Passes on messages to and from this machine."""

    name = "boxes"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._bells = find_bells(self.commons, BELLS, place.size)
        self._boxes = {
            rank: Mailbox(self.commons, box_of(rank))
            for machine in place.others
            for rank in place.machines[machine]
        }
        self._sending: dict[int, _Sending] = {}  # by receiver
        self._refused: dict[int, tuple[float, float]] = {}  # by receiver: first and last time in a row
        self._expected: dict[int, collections.deque[_Expected]] = {
            machine: collections.deque() for machine in place.others
        }

    # What leaves

    def look(self) -> bool:
        changed = False
        for rank, box in self._boxes.items():
            if rank in self._sending:
                changed = self._finish(rank, box) or changed
            elif box.has_messages() and time.monotonic() - self._refused.get(rank, (0, 0))[1] > _RETRY:
                changed = self._offer(rank, box) or changed
        for source in self._expected:
            changed = self._receive(source) or changed
        return changed

    def _offer(self, rank, box):
        taken = box.take(None)
        if taken is None:
            return False
        self._sending[rank] = _Sending(taken)
        self.post.send(self.place.machine_of(rank), self.name, "offer", rank, *taken[1:])
        return True

    def _finish(self, rank, box):
        """Free the memory of a message when it has been sent."""
        sending = self._sending[rank]
        if sending.pieces is None or not all(map(self.post.is_sent, sending.pieces)):
            return False
        box.free(sending.taken.slot)
        del self._sending[rank]
        return True

    def are_empty(self) -> bool:
        """Whether all messages from this machine have left, except to ranks that do not read theirs."""
        latest = time.monotonic() - _PATIENCE
        return not any(
            (rank in self._sending or box.has_messages())
            and self._refused.get(rank, (math.inf, 0))[0] > latest
            for rank, box in self._boxes.items()
        )

    # What arrives

    def take(self, source: int, kind: str, rank: int, *content: Any) -> None:
        if kind == "offer":
            self._consider(source, rank, *content)
        elif kind == "full":
            self._boxes[rank].put_back(self._sending.pop(rank).taken.slot)
            now = time.monotonic()
            self._refused[rank] = self._refused.get(rank, (now, now))[0], now
        else:
            self._refused.pop(rank, None)
            sending = self._sending[rank]
            pieces = self._boxes[rank].pieces(sending.taken.slot, sending.taken.nbytes)
            sending.pieces = [self.post.send_piece(source, piece) for piece in pieces]

    def _consider(self, source, rank, sender, tag, head, nbytes):
        box = Mailbox(self.commons, box_of(rank))
        slot = box.reserve(nbytes, head, sender, tag)
        if slot is None:
            self.post.send(source, self.name, "full", rank)
            return
        self._expected[source].append(_Expected(box, rank, slot, nbytes))
        self.post.send(source, self.name, "accepted", rank)

    def expects(self, machine: int) -> bool:
        """Whether messages of a machine have been accepted that have not arrived."""
        return bool(self._expected[machine])

    def _receive(self, source):
        expected = self._expected[source]
        received = self.post.receive_piece(source) if expected else None
        if received is None:
            return False
        expected[0].add(received)
        if not expected[0].left:
            self._bells[expected.popleft().rank].post()
        return True
