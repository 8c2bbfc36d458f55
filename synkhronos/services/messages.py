"""Messages: arrays that a rank sends to another rank, without waiting on either side.

Each rank has a mailbox with room for a few messages, in memory that belongs to no rank. A message stays
there until it has been read, even if the sender or the receiver dies; then the receiver's replacement
gets it. A rank that dies while it writes a message has sent nothing. A rank that dies while it reads a
message has not received it.
"""

from __future__ import annotations

import math
import numbers
import pickle
from typing import Any

import numpy as np

from synkhronos._checks import check_int
from synkhronos.services import mailbox
from synkhronos.services.mailbox import Mailbox
from synkhronos.services.wakeups import wakeup_semaphores
from synkhronos.stores.named_memory import NamedMemory

#: The name of the bells, one for each rank, which are rung when a message has been sent to it
BELLS = "mailbox"
_LONGEST = 3600.0  # seconds of one wait


class Messages:
    """The messages to and from one rank.

    Parameters
    ----------
    named memory : Commons
        Where the mailboxes are.
    rank, size : int
        This rank, and the number of ranks.
    near : range, optional
        The ranks whose mailboxes are in this named memory, by default all. A progress process takes the
        messages for other ranks.
    """

    def __init__(
        self, named_memory: NamedMemory, rank: int, size: int, near: range | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self._near = range(size) if near is None else near
        self._full = full_boxes(named_memory, size)
        self._on_their_way: set[int] = set()  # the ranks to which messages were sent
        self._named_memory = named_memory
        self._boxes: dict[int, Mailbox] = {}
        self._bells = wakeup_semaphores(named_memory, BELLS, size)

    def _box(self, rank: int) -> Mailbox:
        if rank not in self._boxes:
            self._boxes[rank] = Mailbox(self._named_memory, box_of(rank))
        return self._boxes[rank]

    def send(self, to: int, arrays: Any, tag: int = 0) -> bool:
        """Send arrays to a rank. It never waits for the receiver.

        Parameters
        ----------
        to : int
            The receiver's rank.
        arrays : array, or list of arrays
            Numbers of any shape and memory layout, or values that ``numpy.asarray`` converts to them.
        tag : int
            Distinguishes kinds of messages.

        Returns
        -------
        bool
            False if the receiver's box is full; then nothing was sent.
        """
        _check_integer("send", "the receiver's rank", to)
        _check_integer("send", "a tag", tag)
        if not 0 <= to < self.size:
            raise ValueError(f"send: expected a rank in 0..{self.size - 1}, got {to}")
        if not put(self._box(int(to)), arrays, self.rank, int(tag)):
            return False
        self._bells[to].post()
        if to not in self._near:
            self._on_their_way.add(int(to))
        return True

    def settle(self) -> None:
        """Wait until all messages have arrived, except where a mailbox is full."""
        for rank in self._on_their_way:
            while self._box(rank).has_messages_of(self.rank) and not self._full[rank]:
                self._named_memory.pause()
        self._on_their_way.clear()

    def receive(self, tag: int = 0) -> tuple[int, Any] | None:
        """Return the oldest message with this tag, or None if there is none. It never waits.

        Returns
        -------
        source : int
            The sender's rank.
        arrays : numpy.ndarray, or list of numpy.ndarray
            As they were sent: one array, or a list. They are new arrays, C-contiguous.
        """
        _check_integer("receive", "a tag", tag)
        self._bells[self.rank].drain()
        return take(self._box(self.rank), int(tag))

    def more_to_come(self) -> bool:
        """Whether messages from other machines wait for room in the mailbox although it has room."""
        return bool(self._full[self.rank]) and self._box(self.rank).has_free_slot()

    def wait(self, seconds: float) -> None:
        """Sleep until a message may have arrived, at most this long.

        It also returns after an interrupt, or because of a message with another tag. Messages that
        were there at the last `receive` do not end it.
        """
        if not isinstance(seconds, numbers.Real) or math.isnan(seconds) or seconds < 0:
            raise ValueError(f"wait: expected seconds, a number >= 0, got {seconds!r}")
        self._bells[self.rank].wait(min(float(seconds), _LONGEST))


def put(box: Mailbox, arrays: Any, source: int, tag: int = 0) -> bool:
    """Write a message to a mailbox; return False if it is full. It never waits for the receiver."""
    is_single = not isinstance(arrays, (list, tuple))
    converted = [_convert(array) for array in ([arrays] if is_single else arrays)]
    head = pickle.dumps((is_single, [(array.dtype.str, array.shape) for array in converted]))
    parts = [np.frombuffer(head, np.uint8), *map(_bytes_of, converted)]
    nbytes = sum(part.size for part in parts)
    if nbytes > mailbox.BOX_BYTES:
        raise ValueError(
            f"send: a message of {nbytes} bytes is larger than a mailbox, which has room for "
            f"{mailbox.BOX_BYTES}; send it in parts"
        )
    slot = box.reserve(nbytes, len(head), source, tag)
    if slot is None:
        return False
    try:
        box.write(slot, parts)
    except BaseException:
        box.free(slot)
        raise
    box.publish(slot)
    return True


def take(box: Mailbox, tag: int | None = None) -> tuple[int, Any] | None:
    """Return the source and the arrays of the oldest message with a tag, or None. It never waits."""
    taken = box.take(tag)
    if taken is None:
        return None
    slot = taken.slot
    try:
        head: Any = np.empty(taken.head, np.uint8)
        box.read(slot, [head])
        is_single, types = pickle.loads(head)
        arrays = [np.empty(shape, dtype) for dtype, shape in types]
        box.read(slot, [head, *map(_bytes_of, arrays)])
    except BaseException:
        box.put_back(slot)
        raise
    box.free(slot)
    return taken.source, (arrays[0] if is_single else arrays)


def full_boxes(named_memory: NamedMemory, size: int) -> np.ndarray:
    """Return for each rank whether messages of other machines wait for room in its mailbox.

    For a rank of another machine, whether its mailbox had no room for the last message from here.
    """
    return named_memory.array("mailboxes that are full", (size,), "uint8")


def box_of(rank: int) -> str:
    """Return the name of the mailbox of a rank."""
    return f"mailbox {rank}"


def _check_integer(method: str, what: str, value: Any) -> None:
    check_int(value, method, what=f"{what}, an integer")
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{method}: expected {what} of 64 bits, got {value}")


def _convert(value: Any) -> np.ndarray:
    array = np.asarray(value, order="C")
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"send: expected an array of numbers, or a list of them, got {type(value).__name__} of the "
            f"dtype {array.dtype}"
        )
    return array


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
