"""The exceptions of Synkhronos.

Wrong arguments raise ``TypeError``, ``ValueError`` and ``IndexError``; the classes here are for what
goes wrong with the processes.
"""

from __future__ import annotations

#: What can be done in a broken world
REMEDY = "only restart() and close() are left"


class SynkhronosError(Exception):
    """Base class of all exceptions of this package."""


class NotForkedError(SynkhronosError, RuntimeError):
    """A call before ``fork()`` that needs processes."""


class AlreadyForkedError(SynkhronosError, RuntimeError):
    """``fork()`` while a world exists."""


class ClosedError(SynkhronosError, RuntimeError):
    """A call after ``close()``, or with an object of a world that was closed."""


class FuseError(SynkhronosError, RuntimeError):
    """A `fuse` or `profile` block inside another, or a result requested before its block has ended."""


class WorkerError(SynkhronosError):
    """An exception inside a worker; its traceback is part of the message.

    The processes can still be used. The other ranks have made their updates of the call, except for
    those that come after a collective which this worker did not reach: no rank has made these.

    Attributes
    ----------
    rank : int
        The worker's rank.
    type_name : str
        The name of the exception's class.
    traceback : str
        The worker's traceback, formatted.
    """

    def __init__(self, rank: int, type_name: str, message: str, traceback: str) -> None:
        super().__init__(rank, type_name, message, traceback)
        self.rank = rank
        self.type_name = type_name
        self.message = message
        self.traceback = traceback

    def __str__(self) -> str:
        return (
            f"rank {self.rank} raised {self.type_name}: {self.message}\n\n"
            f"Traceback of rank {self.rank}:\n{self.traceback}"
        )


class WorldBrokenError(SynkhronosError):
    """A worker died or a barrier timed out; only ``restart()`` and ``close()`` are possible."""


class CollectiveAbortedError(SynkhronosError):
    """This rank left a collective because another rank failed in the same command."""


def text_of(error: BaseException) -> str:
    """Return the message of an exception; pygpu's messages are bytes."""
    message = error.args[0] if error.args else ""
    return message.decode(errors="replace") if isinstance(message, bytes) else str(error)
