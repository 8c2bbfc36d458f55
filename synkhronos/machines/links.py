"""Messages between the leaders of machines. ``tests/specifications/links.py`` specifies them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Collection, Sequence

import numpy as np

from synkhronos._errors import REMEDY, WorldBrokenError

#: The largest message, in bytes, that `Links.receive` takes
LONGEST = 1 << 30


def as_bytes(data: bytes | np.ndarray) -> np.ndarray:
    """Return the bytes of a C-contiguous array or of a bytes object, as a 1-d view."""
    if isinstance(data, np.ndarray):
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


class LostError(WorldBrokenError):
    """Other tasks have ended, and MPI continues, which requires ULFM; without it, MPI ends the job.

    Parameters
    ----------
    names : sequence of str
        How messages refer to the tasks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"{' and '.join(names)} left the job: its first process has died, or cannot be reached; "
            f"{REMEDY}"
        )


class Receipt(ABC):
    """A message that is being received into an array."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the whole message has arrived."""

    @abstractmethod
    def cancel(self) -> None:
        """Stop writing to the array.

        Cancel the receipts of a source and tag in reverse order. A message that arrives is received by
        the first one that is not cancelled; in another order, that may be one for a shorter message.
        """


class Links(ABC):
    """Messages among leaders ``0..size-1``. No method waits.

    Messages from one leader to another with the same tag arrive in the order in which they were sent.
    When leaders have died, methods raise `LostError` for messages to them, from them or from any leader.

    Attributes
    ----------
    rank, size : int
        The number of this leader, and the number of all leaders.
    names : sequence of str, optional
        The names of the leaders in messages to users.
    """

    rank: int
    size: int
    names: Sequence[str] = ()

    def name(self, names: Sequence[str]) -> None:
        """Let messages to users call the leaders by these names."""
        self.names = names

    @abstractmethod
    def lost(self) -> Collection[int]:
        """Return the leaders that are known to have died."""

    def acknowledge(self) -> None:  # noqa: B027
        """Let messages from any of the remaining leaders be received again."""

    def lost_error(self) -> LostError:
        """Return the error for the leaders that have died."""
        return LostError(
            [self.names[item] if self.names else f"task {item}" for item in sorted(self.lost())]
        )

    @abstractmethod
    def send(self, to: int, tag: int, data: bytes | np.ndarray) -> int:
        """Start to send bytes or a C-contiguous array, which must not change until they are sent.

        Returns a number for `is_sent`.
        """

    @abstractmethod
    def is_sent(self, number: int) -> bool:
        """Whether the memory of a message may be changed again."""

    @abstractmethod
    def receive(self, source: int | None, tag: int) -> tuple[int, bytes | bytearray] | None:
        """Return the source and the bytes of the next message with a tag, or None if there is none.

        Parameters
        ----------
        source : int or None
            None for any leader.
        """

    @abstractmethod
    def receive_into(self, source: int, tag: int, array: np.ndarray) -> Receipt:
        """Start to receive the next message from `source` into a C-contiguous array of its size."""

    @abstractmethod
    def discard(self, tag: int) -> None:
        """Receive and forget the messages with a tag that have arrived."""
