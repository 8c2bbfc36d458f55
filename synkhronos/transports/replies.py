"""The replies of many ranks, side by side in shared memory: the master reads them all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

if TYPE_CHECKING:
    from synkhronos.stores.memory import SharedMemory
    from synkhronos.transports.mailbox import Mailbox

_WORDS = 16  # of 8 bytes for each rank: two cache lines. The first is the number of bytes of the reply
_START = 8
#: The bytes of the longest reply that is here
ROOM = 8 * _WORDS - _START
_ELSEWHERE = -1


class Replies:
    """A short reply of each rank; longer ones are in mailboxes.

    Parameters
    ----------
    memory : SharedMemory
        Where to allocate it.
    boxes : list of Mailbox
        One for each rank.
    """

    def __init__(self, memory: SharedMemory, boxes: Sequence[Mailbox]) -> None:
        self._boxes = boxes
        self._block = memory.allocate(8 * _WORDS * len(boxes))
        self._room = memory.mapping
        self._first = memory.offset(self._block)
        self._stop = self._first + 8 * _WORDS * len(boxes)
        self._lengths = self._block.data.cast("q")
        self._starts = range(_START, self._stop - self._first, 8 * _WORDS)

    def put(self, rank: int, payload: bytes) -> None:
        """Replace the reply of a rank."""
        nbytes = len(payload)
        if nbytes > ROOM:
            self._boxes[rank].put(payload)
            self._lengths[_WORDS * rank] = _ELSEWHERE
        else:
            start = self._first + self._starts[rank]
            self._room[start : start + nbytes] = payload
            self._lengths[_WORDS * rank] = nbytes

    def get(self) -> list[bytes]:
        """Return the replies of all ranks."""
        block = self._room[self._first : self._stop]
        lengths = memoryview(block).cast("q")[::_WORDS].tolist()
        replies = [block[start : start + nbytes] for start, nbytes in zip(self._starts, lengths)]
        if _ELSEWHERE in lengths:
            for rank, nbytes in enumerate(lengths):
                if nbytes == _ELSEWHERE:
                    replies[rank] = self._boxes[rank].get()
        return replies
