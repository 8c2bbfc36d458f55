"""Messages: arrays that a rank sends to another rank, without waiting on either side.

Each rank has a mailbox with room for a few messages, in memory that belongs to no rank. A message stays
there until it has been read, even if the sender or the receiver dies; then the receiver's replacement
gets it. A rank that dies while it writes a message has sent nothing. A rank that dies while it reads a
message has not received it.

Any rank can write to a mailbox, and its owner reads it. A *lock of the box* guards short changes of its
tables. The data are copied without this lock, while the sender or the receiver holds the lock of a slot,
so no rank waits for a copy. A slot that is being written or read, and whose lock is free, belonged to a
rank that died: a message that was being written is discarded, and a message that was being read stays in
the box.

The data are in *chunks* of one size, which belong to the slot until the message has been read. A chunk
is free if its slot is free. So chunks need not be returned, and a rank may die between any two steps.
"""

from __future__ import annotations

import functools
import math
import numbers
import pickle
import time
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np

from synkhronos._checks import check_int
from synkhronos.services.registers import wakeup_semaphores
from synkhronos.stores.named_memory import NamedMemory

SLOTS = 8
#: Bytes of all messages in one mailbox
BOX_BYTES = 1 << 30

_CHUNK_BYTES = 1 << 20
_FREE, _WRITING, _READY, _READING = range(4)
_AFTER_DEATH = {_WRITING: _FREE, _READING: _READY}
_STATE, _SOURCE, _TAG, _SEQUENCE, _HEAD, _NBYTES = range(6)  # words of a slot
_PATIENCE = 0.1  # seconds to wait for the lock of the box, which is held for microseconds
_NAP = 5e-5

#: The name of the bells, one for each rank, which are rung when a message has been sent to it
BELLS = "mailbox"
_LONGEST = 3600.0  # seconds of one wait


class Messages:
    """The messages to and from one rank.

    Parameters
    ----------
    named_memory : NamedMemory
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
        self._box = functools.lru_cache(None)(lambda rank: Mailbox(named_memory, box_of(rank)))
        self._bells = wakeup_semaphores(named_memory, BELLS, size)

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


class Taken(NamedTuple):
    """A message that is being read.

    Attributes
    ----------
    slot, source, tag : int
        Its slot, its sender and its tag.
    head, nbytes : int
        The length of its first part, and of the whole message.
    """

    slot: int
    source: int
    tag: int
    head: int
    nbytes: int


class Mailbox:
    """The mailbox of a rank, as any rank sees it.

    Parameters
    ----------
    named_memory : NamedMemory
        Where its memory is.
    name : str
        The name by which all ranks know the receiver.
    """

    def __init__(self, named_memory: NamedMemory, name: str) -> None:
        self._named_memory = named_memory
        self._slots = named_memory.array(f"{name} slots", (SLOTS, 6), "int64").data
        self._sent = named_memory.array(f"{name} sent", 1, "int64").data
        # For each chunk, the slot that it belongs to, from 1; 0 if it was never used.
        self._users = named_memory.array(f"{name} chunks", BOX_BYTES // _CHUNK_BYTES, "uint8")
        self._chunk = functools.lru_cache(None)(
            lambda number: named_memory.array(f"{name} chunk {number}", _CHUNK_BYTES, "uint8")
        )
        self._lock, *self._locks = named_memory.locks(name, 1 + SLOTS)

    # Sending

    def reserve(self, nbytes: int, head: int, source: int, tag: int) -> int | None:
        """Return a slot to write to, or None if there is no room. This rank has its lock."""
        if not self._enter():
            return None
        try:
            self._recover()
            slots = self._slots
            is_free = [slots[slot, _STATE] == _FREE for slot in range(SLOTS)]
            free = np.flatnonzero(np.array([True, *is_free])[self._users])
            needed = -(-nbytes // _CHUNK_BYTES)
            if len(free) < needed:
                return None
            for slot in range(SLOTS):
                if is_free[slot] and self._locks[slot].try_acquire():
                    break
            else:
                return None
            self._users[self._users == 1 + slot] = 0
            self._users[free[:needed]] = 1 + slot
            slots[slot, _SOURCE], slots[slot, _TAG] = source, tag
            slots[slot, _HEAD], slots[slot, _NBYTES] = head, nbytes
            slots[slot, _STATE] = _WRITING
            return slot
        finally:
            self._lock.release()

    def write(self, slot: int, parts: Sequence[np.ndarray]) -> None:
        """Write the bytes of a message, 1-d arrays of ``uint8``."""
        for part, chunk in self._places(slot, parts):
            chunk[...] = part

    def publish(self, slot: int) -> None:
        """Make a complete message available to the receiver."""
        try:
            self._wait_to_enter()
        except BaseException:
            self.free(slot)
            raise
        try:
            self._sent[0] += 1
            self._slots[slot, _SEQUENCE] = self._sent[0]
            self._slots[slot, _STATE] = _READY
            self._locks[slot].release()
        finally:
            self._lock.release()

    def _wait_to_enter(self) -> None:
        # Not in the block: Python 3.13 leaves it if a handler raises where such a loop jumps back.
        while not self._enter():
            self._named_memory.pause()

    # Receiving

    def has_messages(self) -> bool:
        """Whether there is a message to take, with any tag."""
        return any(self._slots[slot, _STATE] == _READY for slot in range(SLOTS))

    def has_free_slot(self) -> bool:
        """Whether there is a slot for a message."""
        return any(self._slots[slot, _STATE] == _FREE for slot in range(SLOTS))

    def has_messages_of(self, source: int) -> bool:
        """Whether there is a message from this rank that has not been read completely."""
        slots = self._slots
        return any(slots[slot, _STATE] and slots[slot, _SOURCE] == source for slot in range(SLOTS))

    def take(self, tag: int | None) -> Taken | None:
        """Return the oldest message with this tag, or with any tag if it is None; None if there is none.

        This rank has the lock of the slot.
        """
        if not self._enter():
            return None
        try:
            self._recover()
            slots = self._slots
            ready = [
                (slots[slot, _SEQUENCE], slot)
                for slot in range(SLOTS)
                if slots[slot, _STATE] == _READY and tag in (None, slots[slot, _TAG])
            ]
            if not ready:
                return None
            slot = min(ready)[1]
            if not self._locks[slot].try_acquire():
                return None
            slots[slot, _STATE] = _READING
            return Taken(slot, *(slots[slot, word] for word in (_SOURCE, _TAG, _HEAD, _NBYTES)))
        finally:
            self._lock.release()

    def read(self, slot: int, parts: Sequence[np.ndarray]) -> None:
        """Copy the bytes of a message, from its start, to 1-d arrays of ``uint8``."""
        for part, chunk in self._places(slot, parts):
            part[...] = chunk

    # Both

    def pieces(self, slot: int, nbytes: int) -> Iterator[np.ndarray]:
        """Yield the memory of a message of `nbytes` bytes, in arrays of ``uint8``."""
        for number in np.flatnonzero(self._users == 1 + slot).tolist():
            chunk = self._chunk(number)
            yield chunk[: min(nbytes, chunk.size)]
            nbytes -= chunk.size

    def free(self, slot: int) -> None:
        """Free a slot, after its message was read, or because it cannot be written."""
        self._slots[slot, _STATE] = _FREE
        self._locks[slot].release()

    def put_back(self, slot: int) -> None:
        """Leave a message in the box, because it cannot be read now."""
        self._slots[slot, _STATE] = _READY
        self._locks[slot].release()

    def _enter(self) -> bool:
        """Take the lock of the box; return False if a rank was stopped while it had it."""
        until = time.monotonic() + _PATIENCE
        while not self._lock.try_acquire():
            if time.monotonic() > until:
                return False
            time.sleep(_NAP)
        return True

    def _recover(self) -> None:
        """Find the slots of ranks that died."""
        slots = self._slots
        for slot, lock in enumerate(self._locks):
            if slots[slot, _STATE] not in _AFTER_DEATH or not lock.try_acquire():
                continue
            try:
                state = slots[slot, _STATE]  # again: a live rank may have finished its copy since
                slots[slot, _STATE] = _AFTER_DEATH.get(state, state)
            finally:
                lock.release()

    def _places(self, slot: int, parts: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the parts in pieces, each with its place in a chunk."""
        pieces = self.pieces(slot, sum(part.size for part in parts))
        room = np.empty(0, np.uint8)
        for part in parts:
            start = 0
            while start < part.size:
                if not room.size:
                    room = next(pieces)
                length = min(part.size - start, room.size)
                yield part[start : start + length], room[:length]
                start, room = start + length, room[length:]


def put(box: Mailbox, arrays: Any, source: int, tag: int = 0) -> bool:
    """Write a message to a mailbox; return False if it is full. It never waits for the receiver."""
    is_single = not isinstance(arrays, (list, tuple))
    converted = [_convert(array) for array in ([arrays] if is_single else arrays)]
    head = pickle.dumps((is_single, [(array.dtype.str, array.shape) for array in converted]))
    parts = [np.frombuffer(head, np.uint8), *map(_bytes_of, converted)]
    nbytes = sum(part.size for part in parts)
    if nbytes > BOX_BYTES:
        raise ValueError(
            f"send: a message of {nbytes} bytes is larger than a mailbox, which has room for "
            f"{BOX_BYTES}; send it in parts"
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
