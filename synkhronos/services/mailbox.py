"""The mailbox of one rank: a few slots for messages, in the named memory.

Any rank can write messages to it, and its owner reads them. A *lock of the box* guards short changes of
its tables. The data are copied without this lock, while the sender or the receiver holds the lock of the
slot, so no rank waits for a copy. A slot that is being written or read, and whose lock is free, belonged
to a rank that died: a message that was being written is discarded, and a message that was being read
stays in the box.

The data are in *chunks* of one size, which belong to the slot until the message has been read. A chunk
is free if its slot is free. So chunks need not be returned, and a rank may die between any two steps.
"""

from __future__ import annotations

import time
from typing import Iterator, NamedTuple, Sequence

import numpy as np

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
    named memory : Commons
        Where its memory is.
    name : str
        The name by which all ranks know the receiver.
    """

    def __init__(self, named_memory: NamedMemory, name: str) -> None:
        self._named_memory, self._name = named_memory, name
        self._slots = named_memory.array(f"{self._name} slots", (SLOTS, 6), "int64").data
        self._sent = named_memory.array(f"{self._name} sent", 1, "int64").data
        # For each chunk, the slot that it belongs to, from 1; 0 if it was never used.
        self._users = named_memory.array(f"{self._name} chunks", BOX_BYTES // _CHUNK_BYTES, "uint8")
        self._chunks: dict[int, np.ndarray] = {}
        self._lock, *self._locks = named_memory.locks(self._name, 1 + SLOTS)

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

    def _chunk(self, number: int) -> np.ndarray:
        if number not in self._chunks:
            name = f"{self._name} chunk {number}"
            self._chunks[number] = self._named_memory.array(name, _CHUNK_BYTES, "uint8")
        return self._chunks[number]
