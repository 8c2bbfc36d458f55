"""The memory in which batches are passed on: a few slots for a batch each, and how far everybody is.

Each rank gets its batches in its own order of time, and each process has its own part of each batch. So
every number here has a single writer, and no lock is needed, which a killed process could leave locked:

``filled[rank, process]``   how many batches the process has finished for the rank
``taken[rank]``             how many batches the rank no longer uses
``counts[slot, rank, process]``
                            how many rows the process has written to its part of the slot
``begun[process]``, ``go[0]``
                            the generation that the process is ready for, and the one that may be
                            loaded. A new generation begins with each jump to another epoch.
``failed[process]``, ``text[process]``
                            whether the process has given up in this generation, and why
``unreadable[row]``, ``n_skipped[process]``
                            which rows could not be read, and how often that was noted

A process may write batch `n` while ``n < taken[rank] + slots``, to slot ``n % slots``. The semaphores
``ready[rank]`` and ``free[process]`` wake those who wait; they may be posted without need.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import numpy as np

from synkhronos._errors import ClosedError, SynkhronosError
from synkhronos.services.background_processes import (
    SEMAPHORE_BYTES,
    MappedMemory,
    map_memory,
    open_semaphore,
)

#: The most ranks; there are semaphores for them.
MOST_RANKS = 1024
#: The generation of a loader that was closed
CLOSED = -1

_FIELD = "field "  # before the number of an array of the batches
_TEXT = 1 << 16  # bytes for the reason of a failure
_TOKEN = 16  # bytes
_ALIGNMENT = 4096


class Field(NamedTuple):
    """What a row has in one of the arrays of a batch."""

    shape: tuple[int, ...]
    dtype: str


class Layout(NamedTuple):
    """What determines the arrays of a `Ring`.

    Attributes
    ----------
    fields : tuple of Field
        One for each array of a batch.
    batch_size, slots, processes, length : int
        `length` is the number of rows of the source.
    """

    fields: tuple[Field, ...]
    batch_size: int
    slots: int
    processes: int
    length: int

    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and the dtype of each array, by name."""
        of_ranks = (MOST_RANKS, self.processes)
        made: dict[str, tuple[tuple[int, ...], str]] = {
            "token": ((_TOKEN,), "u1"),
            "go": ((1,), "i8"),
            "begun": ((self.processes,), "i8"),
            "failed": ((self.processes,), "i8"),
            "n_skipped": ((self.processes,), "i8"),
            "taken": ((MOST_RANKS,), "i8"),
            "filled": (of_ranks, "i8"),
            "counts": ((self.slots, *of_ranks), "i8"),
            "ready": ((MOST_RANKS, SEMAPHORE_BYTES), "u1"),
            "free": ((self.processes, SEMAPHORE_BYTES), "u1"),
            "text": ((self.processes, _TEXT), "u1"),
            "unreadable": ((self.length,), "u1"),
        }
        for number, field in enumerate(self.fields):
            made[f"{_FIELD}{number}"] = (self.slots, self.batch_size, *field.shape), field.dtype
        return made

    def places(self) -> tuple[dict[str, int], int]:
        """Return the offset of each array, and the number of bytes of all."""
        places, offset = {}, 0
        for name, (shape, dtype) in self.arrays().items():
            places[name] = offset
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return places, max(offset, _ALIGNMENT)


class Ring:
    """The slots and the numbers, as one process sees them.

    Parameters
    ----------
    layout : Layout
    memory : MappedMemory, optional
        The memory, in the process that has allocated it, and those that are forked from it.
    path : str, optional
        Where another process finds it.
    token : bytes, optional
        What the memory at the path has to begin with.

    Raises
    ------
    SynkhronosError
        If the memory at the path is not that of the loader.
    """

    def __init__(
        self,
        layout: Layout,
        memory: MappedMemory | None = None,
        path: str = "",
        token: bytes | None = None,
    ) -> None:
        self.layout, self._memory, self.path = layout, memory, path if memory is None else memory.path
        array: Any = _map(self.path, layout) if memory is None else memory.array
        places, _ = layout.places()
        found = {}
        for name, (shape, dtype) in layout.arrays().items():
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            found[name] = array[places[name] : places[name] + nbytes].view(dtype).reshape(shape)
            if not name.startswith(_FIELD):
                found[name] = np.asarray(found[name])  # faster than a memmap
        self.go, self.begun, self.failed = found["go"], found["begun"], found["failed"]
        self.taken, self.filled, self.counts = found["taken"], found["filled"], found["counts"]
        self.n_skipped, self.unreadable = found["n_skipped"], found["unreadable"]
        self.fields = [found[f"{_FIELD}{number}"] for number in range(len(layout.fields))]
        self._text, self._ready = found["text"], found["ready"]
        is_new = memory is not None
        if is_new:
            found["token"][:] = np.frombuffer(os.urandom(_TOKEN), np.uint8)
            for place in self._ready:
                open_semaphore(place, is_new)
        elif found["token"].tobytes() != token:
            raise _not_here(self.path)
        self.token = found["token"].tobytes()
        self._bells: dict[int, Any] = {}
        self._free = [open_semaphore(place, is_new) for place in found["free"]]

    @classmethod
    def new(cls, layout: Layout) -> Ring:
        """Return a ring in new memory."""
        return cls(layout, MappedMemory(layout.places()[1], "synkhronos-loading"))

    def __reduce__(self) -> tuple:
        return Ring, (self.layout, None, self.path, self.token)

    def ready(self, rank: int) -> Any:
        """Return the semaphore for which a rank waits."""
        if rank not in self._bells:
            self._bells[rank] = open_semaphore(self._ready[rank])
        return self._bells[rank]

    def free(self, process: int) -> Any:
        """Return the semaphore for which a process waits."""
        return self._free[process]

    def wake_processes(self) -> None:
        """Let all processes look at the numbers."""
        for bell in self._free:
            bell.post()

    # What a process has to say

    def fail(self, process: int, text: str, ranks: int) -> None:
        """Say to all ranks why a process has given up."""
        data = text.encode()[: _TEXT - 1]
        self._text[process, : len(data)] = np.frombuffer(data, np.uint8)
        self._text[process, len(data)] = 0
        self.failed[process] = 1
        for rank in range(ranks):
            self.ready(rank).post()

    def reason(self, process: int) -> str:
        """Return why a process has given up."""
        return self._text[process].tobytes().partition(b"\0")[0].decode(errors="replace")

    # Its end

    def close(self) -> None:
        """Refuse everything from now on, and return the memory to the system."""
        if self._memory is not None:
            self._memory.close()  # what is written afterwards is still seen in other processes
            self.go[0] = CLOSED

    def check_open(self) -> None:
        """Raise ``ClosedError`` if the loader was closed."""
        if self.go[0] == CLOSED:
            raise ClosedError("loading: this loader was closed")


def _map(path: str, layout: Layout) -> np.ndarray:
    try:
        array = map_memory(path)
    except (OSError, ValueError) as error:
        raise _not_here(path) from error
    if len(array) < layout.places()[1]:
        raise _not_here(path)
    return array


def _not_here(path: str) -> SynkhronosError:
    return SynkhronosError(
        f"loading: the memory of the loader ({path}) is not on this machine, or the loader was closed; "
        f"only ranks on the machine of the script can use its loader"
    )
