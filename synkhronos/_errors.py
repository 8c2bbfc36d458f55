"""The exceptions and warnings of Synkhronos.

Wrong arguments raise ``TypeError``, ``ValueError`` or ``IndexError``. The classes in this module report
problems with the processes, and results that differ between ranks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from traceback import StackSummary, walk_tb
from typing import Any, Callable, Sequence

#: The remedy in messages about a broken world
REMEDY = "only restart() and close() can be called"

#: In a program of ``spmd()``, for other public functions
IN_PROGRAM = (
    "inside a program of spmd(), ranks run by themselves: use the methods of its argument, such as "
    "rank.call(f, ...) or rank.all_reduce(...)"
)

#: For a call before another call has returned
BUSY = (
    "another call has not returned yet; use the processes from one thread at a time, and not from a "
    "signal handler. Inside an operation of a graph, use a function of the compiler itself, such as "
    "theano.function() returns"
)


class SynkhronosError(Exception):
    """Base class of all exceptions of this package."""


class NotForkedError(SynkhronosError, RuntimeError):
    """A call that needs processes, before ``fork()``."""


class AlreadyForkedError(SynkhronosError, RuntimeError):
    """A call of ``fork()`` while there are processes already."""


class ClosedError(SynkhronosError, RuntimeError):
    """A call after ``close()``, or with an object whose processes were closed."""


class FuseError(SynkhronosError, RuntimeError):
    """A nested `fuse` or `profile` block, or use of a result before its `fuse` block has ended."""


class WorkerError(SynkhronosError):
    """An exception inside a worker; its traceback is part of the message.

    The processes can still be used. The other ranks have made the updates of the call, except updates
    after a collective that this worker did not reach, which no rank has made.

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

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the worker's traceback, the script's part of ours."""
        script = StackSummary.extract(
            (frame, line)
            for frame, line in walk_tb(self.__traceback__)
            if frame.f_globals.get("__name__", "").partition(".")[0] not in ("IPython", "synkhronos")
        )
        first = str(self).partition("\n")[0]
        text = (
            f"Traceback of rank {self.rank}:\n{self.traceback.rstrip()}\n\n"
            f"Traceback (most recent call last):\n{''.join(script.format())}"
            f"{type(self).__name__}: {first}"
        )
        return text.splitlines()


class WorldBrokenError(SynkhronosError):
    """A worker died or a barrier timed out; only ``restart()`` and ``close()`` can be called."""


class CollectiveAbortedError(SynkhronosError):
    """This rank left a collective because another rank failed in the same command."""


class MissingRankError(SynkhronosError):
    """This rank waited for a rank that has ended the program without reaching the same point."""


class MismatchError(SynkhronosError):
    """A result differs from the serial result, or replicas of a variable from the master's.

    Attributes
    ----------
    names : list of str
        The outputs and shared variables that differ.
    """

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message, names)
        self.names = list(names)

    def __str__(self) -> str:
        return str(self.args[0])


class SynkhronosWarning(UserWarning):
    """A valid script whose results probably differ from a run on one process.

    The page "Checking results" of the documentation says when it is given. If the script ignores all
    warnings, it is a line of the log instead, which is on stderr by default.
    """


def warn(message: str) -> None:
    """Issue a `SynkhronosWarning` for the line of the script that called this package."""
    prepare_warning()(message)


def prepare_warning() -> Callable[[str], None]:
    """Return a function that issues a `SynkhronosWarning` for the present line of the script."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        frame = frame.f_back
    return functools.partial(
        _issue,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _issue(file: str, line: int, module: str | None, registry: dict[Any, Any], message: str) -> None:
    """Issue a warning, and log it if Python hides it though the script did not request that."""
    warnings.warn_explicit(message, SynkhronosWarning, file, line, module, registry)
    key = message, line, "logged"  # Python empties the registry when filters change
    if key not in registry and (_logger.hasHandlers() or _is_hidden(message, line, module)):
        registry[key] = True
        _logger.warning("%s:%d: %s: %s", file, line, SynkhronosWarning.__name__, message)


def _is_hidden(message: str, line: int, module: str | None) -> bool:
    """Whether a filter for all kinds of warnings ignores this warning.

    Many scripts begin with ``warnings.filterwarnings("ignore")``, because of other libraries.
    """
    for action, text, category, where, number in warnings.filters:
        is_of_kind = issubclass(SynkhronosWarning, category) and number in (0, line)
        if is_of_kind and _matches(text, message) and _matches(where, module or ""):
            return action == "ignore" and category is not SynkhronosWarning and text is None
    return False


def _matches(pattern: Any, text: str) -> bool:
    """Whether a text has the pattern of a filter, which may be None for any."""
    if pattern is None or isinstance(pattern, str):
        return pattern in (None, text)
    return pattern.match(text) is not None


_logger = logging.getLogger(__package__)

# Of this package, and of ``with synk.fuse()``.
_INNER = (os.path.join(os.path.dirname(os.path.abspath(__file__)), ""), contextlib.__file__)


def text_of(error: BaseException) -> str:
    """Return the message of an exception; pygpu's messages are bytes."""
    message = error.args[0] if error.args else ""
    return message.decode(errors="replace") if isinstance(message, bytes) else str(error)
