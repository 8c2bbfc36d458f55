"""The replies of all ranks to a command: their results, or the error that is raised in the master."""

from __future__ import annotations

import pickle
from typing import Any, Sequence

from synkhronos._errors import CollectiveAbortedError, WorkerError


def results_of(replies: Sequence[bytes | None], own: Any, error: BaseException | None) -> list:
    """Return the results by rank.

    Parameters
    ----------
    replies : sequence of bytes
        The reply of each rank; None for the master's.
    own : object
        The result of the master.
    error : BaseException or None
        What the command raised in the master. It is raised again, unless it is only the consequence of
        an error in a worker.

    Raises
    ------
    WorkerError
        If a worker raised an exception: the error of the first rank that failed by itself, not because
        another rank failed.
    """
    results, failures = [], None
    for rank, reply in enumerate(replies):
        status, result = (None, own) if reply is None else pickle.loads(reply)
        results.append(result)
        if status is not None:
            failures = [*(failures or ()), (rank, *status)]
    if error is not None and not isinstance(error, CollectiveAbortedError):
        raise error
    if failures:
        rank, _, *cause = min(failures, key=lambda failure: failure[1])
        raise WorkerError(rank, *cause) from error
    if error is not None:
        raise error
    return results
