"""Semaphores that have a name for the moment between their making and its removal."""

import os
from typing import Iterator

import posix_ipc

from synkhronos.transports import limits


def make_semaphores(count: int) -> Iterator[posix_ipc.Semaphore]:
    """Return an iterator over new semaphores, at zero, that have no names any more.

    Raises
    ------
    SynkhronosError
        If there is no place for them; none is left then.
    """
    made = []
    try:
        for _ in range(count):
            # The random names of posix_ipc itself depend on the second at which it was imported only.
            name = f"/synkhronos-{os.urandom(16).hex()}"
            made.append(posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600, initial_value=0))
            made[-1].unlink()
    except (OSError, posix_ipc.Error) as error:
        for semaphore in made:
            semaphore.close()
        raise limits.too_many_semaphores(error, len(made), count) from error
    return iter(made)


def drain(semaphore: posix_ipc.Semaphore) -> None:
    """Bring a semaphore to zero."""
    while semaphore.value:
        semaphore.acquire()
