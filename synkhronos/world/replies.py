"""The replies of all ranks to a command: their results, or the error that is raised in the master."""

from __future__ import annotations

import traceback
from pickle import HIGHEST_PROTOCOL, dumps, loads
from typing import Any, NamedTuple, NoReturn, Sequence

from synkhronos._errors import CollectiveAbortedError, WorkerError


class Failure(NamedTuple):
    """The reply of a rank whose command has raised an exception.

    Attributes
    ----------
    was_aborted : bool
        Whether it failed only because another rank has.
    kind, message, traceback : str
        Of the exception.
    """

    was_aborted: bool
    kind: str
    message: str
    traceback: str


def failure(error: Exception) -> bytes:
    """Return a reply that reports an exception, in its ``except`` block."""
    try:
        message = str(error)
    except Exception as worse:  # raised by a user's class
        message = f"(str() of the exception raised {type(worse).__name__})"
    was_aborted = isinstance(error, CollectiveAbortedError)
    return success(Failure(was_aborted, type(error).__name__, message, traceback.format_exc()))


def success(result: Any) -> bytes:
    """Return a reply with the result of a command."""
    return dumps(result, HIGHEST_PROTOCOL)


def results_of(replies: Sequence[bytes | None], own: Any, error: BaseException | None) -> list:
    """Return the results by rank.

    Parameters
    ----------
    replies : sequence of bytes
        The reply of each rank; None for the master's.
    own : object
        The result of the master.
    error : BaseException or None
        The exception that the command raised in the master. It is raised again, unless it is only the
        consequence of an error in a worker.

    Raises
    ------
    WorkerError
        If a worker raised an exception: the error of the first rank that failed by itself, not because
        another rank failed.
    """
    results, has_failed = [], error is not None
    for reply in replies:
        result = own if reply is None else loads(reply)
        if type(result) is Failure:
            has_failed = True
        results.append(result)
    if has_failed:
        _raise(results, error)
    return results


def _raise(results: Sequence[Any], error: BaseException | None) -> NoReturn:
    failures = [(rank, result) for rank, result in enumerate(results) if type(result) is Failure]
    if error is not None and not (failures and isinstance(error, CollectiveAbortedError)):
        raise error
    rank, first = min(failures, key=lambda pair: pair[1].was_aborted)
    raise WorkerError(rank, first.kind, first.message, first.traceback) from error
