"""Messages to ranks of other machines.

A rank puts a message for any rank into a mailbox on its own machine. The progress process takes messages
for ranks of another machine, and offers them to the progress process there, which accepts a message if
the receiver's own mailbox has room. Otherwise the message stays where it is, so that the sender's
mailbox becomes full as well.
"""

from __future__ import annotations

import collections
import math
import time
from typing import Any, Iterator

import numpy as np

from synkhronos.machines.relay.part import RelayContext, RelayPart
from synkhronos.services.mailbox import Mailbox, Taken
from synkhronos.services.messages import BELLS, box_of, full_boxes
from synkhronos.services.wakeups import wakeup_semaphores

_RETRY = 2e-3  # seconds after which a message is offered again
_PATIENCE = 1.0  # seconds without room after which a mailbox counts as not being read


class _Expected:
    """A message that was accepted for a rank of this machine.

    Attributes
    ----------
    rank : int
        The receiver.
    left : int
        How many bytes have not arrived.
    more : bool
        Whether the machine has more messages for this rank.
    """

    def __init__(self, box: Mailbox, rank: int, slot: int, nbytes: int, more: bool) -> None:
        self._box, self._slot = box, slot
        self.rank, self.left, self.more = rank, nbytes, more
        self._pieces: Iterator[np.ndarray] = box.pieces(slot, nbytes)

    def add(self, piece: np.ndarray) -> None:
        next(self._pieces)[...] = piece
        self.left -= piece.size
        if not self.left:
            self._box.publish(self._slot)


class RelayedMessages(RelayPart):
    """Passes on messages to and from this machine."""

    name = "messages"

    def __init__(self, context: RelayContext) -> None:
        super().__init__(context)
        self._bells = wakeup_semaphores(self.named_memory, BELLS, context.size)
        self._boxes = {
            rank: Mailbox(self.named_memory, box_of(rank))
            for machine in context.others
            for rank in context.machines[machine]
        }
        self._full = full_boxes(self.named_memory, context.size)
        # By rank, the machines that have more messages for it
        self._more: dict[int, set[int]] = {rank: set() for rank in context.own}
        self._sending: dict[int, Taken] = {}  # by receiver
        self._refused: dict[int, tuple[float, float]] = {}  # by receiver: first and last time
        self._expected: dict[int, collections.deque[_Expected]] = {
            machine: collections.deque() for machine in context.others
        }

    # What leaves

    def look(self) -> bool:
        changed = False
        for rank, box in self._boxes.items():
            if rank in self._sending:
                continue
            if box.has_messages() and time.monotonic() - self._refused.get(rank, (0, 0))[1] > _RETRY:
                changed = self._offer(rank, box) or changed
        for source in self._expected:
            changed = self._receive(source) or changed
        return changed

    def _offer(self, rank: int, box: Mailbox) -> bool:
        taken = box.take(None)
        if taken is None:
            return False
        self._sending[rank] = taken
        offer = "offer", rank, *taken[1:], box.has_messages()
        self.links.send(self.context.machine_of(rank), self.name, *offer)
        return True

    def have_arrived(self) -> bool:
        """Whether all messages from here have arrived, except to ranks that do not read theirs."""
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
            self._boxes[rank].put_back(self._sending.pop(rank).slot)
            now = time.monotonic()
            self._refused[rank] = self._refused.get(rank, (now, now))[0], now
            self._full[rank] = 1
        elif kind == "accepted":
            self._refused.pop(rank, None)
            self._full[rank] = 0
            taken = self._sending[rank]
            for piece in self._boxes[rank].pieces(taken.slot, taken.nbytes):
                self.links.send_piece(source, piece)
        else:
            self._boxes[rank].free(self._sending.pop(rank).slot)

    def _note_more(self, rank: int, source: int, more: bool) -> None:
        machines = self._more[rank]
        machines.add(source) if more else machines.discard(source)
        self._full[rank] = bool(machines)

    def _consider(
        self, source: int, rank: int, sender: int, tag: int, head: int, nbytes: int, more: bool
    ) -> None:
        box = Mailbox(self.named_memory, box_of(rank))
        slot = box.reserve(nbytes, head, sender, tag)
        if slot is None:
            self._note_more(rank, source, True)
            self.links.send(source, self.name, "full", rank)
            return
        self._expected[source].append(_Expected(box, rank, slot, nbytes, more))
        self.links.send(source, self.name, "accepted", rank)

    def _receive(self, source: int) -> bool:
        expected = self._expected[source]
        received = self.links.receive_piece(source) if expected else None
        if received is None:
            return False
        expected[0].add(received)
        if not expected[0].left:
            rank, more = expected[0].rank, expected.popleft().more
            self._note_more(rank, source, more)
            self._bells[rank].post()
            self.links.send(source, self.name, "arrived", rank)
        return True
