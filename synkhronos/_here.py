"""What a command is, and what it finds where it runs.

A command is an object with one method, ``run(here)``. The master makes it, the transport brings it to
every worker, each rank runs it on its own state `here`, and what ``run`` returns, or the exception that
it raises, comes back to the master with the finish barrier. The public function and its command stand
together in one module; there is no other list of what a worker can do.
"""

from __future__ import annotations

import math
import pickle
import traceback
from abc import ABC, abstractmethod
from typing import Any, Hashable

import numpy as np

from synkhronos._errors import CollectiveAbortedError
from synkhronos._partition import as_slice
from synkhronos._typing import Array, Reference, Rows, SharedVariable
from synkhronos.comms.base import Communicator
from synkhronos.engines.base import Engine
from synkhronos.transports.base import Transport


class Command(ABC):
    """Something that every rank does. Keep it small: it is pickled for each call."""

    @abstractmethod
    def run(self, here: Here) -> Any:
        """Do it, with the state of this rank, and return what the master needs of it."""


class Here:
    """A rank's own state: what a command finds where it runs.

    Attributes
    ----------
    rank, size, master_rank : int
    memory : SharedMemory
    comm : Communicator
    engine : Engine
    functions : list of Function
        By number; the same on every rank once they are replicated.
    shareds : list of shared variables
        By number; this rank's replicas.
    rows : dict
        How many rows each function, by number, had in its last call on this rank.
    files : dict
        This rank's mappings of the files that `Data` of ``numpy.memmap`` lie in.
    outbox : list of arrays
        What lies in shared memory until the master has read it; emptied at the next command.
    log : object or None
        What is being measured, while `profile` is on.
    """

    def __init__(self, transport: Transport, comm: Communicator, engine: Engine) -> None:
        self.transport = transport
        self.comm = comm
        self.engine = engine
        self.memory = transport.memory
        self.size = transport.size
        self.master_rank = transport.master_rank
        self.functions: list[Any] = []
        self.shareds: list[SharedVariable] = []
        self.rows: dict[int, int] = {}
        self.files: dict[Reference, np.ndarray] = {}
        self.outbox: list[np.ndarray] = []
        self.log: Any = None
        self._buffers: dict[Hashable, np.ndarray] = {}
        self._payload: bytes | None = None
        self._command: Any = None

    def take(self, key: Hashable, array: Array, rows: Rows) -> Array:
        """Return rows of an array: a view of a range of them; else an excerpt, in the key's buffer."""
        if not isinstance(array, np.ndarray):
            return self.engine.take(array, rows)
        if type(rows) is range:
            return array[as_slice(rows)]
        shape = (len(rows), *array.shape[1:])
        size = math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < size or buffer.dtype != array.dtype:
            buffer = self._buffers[key] = np.empty(size, array.dtype)
        # The rows were checked in the master; the mode "raise" would go through another buffer.
        return np.take(array, rows, axis=0, out=buffer[:size].reshape(shape), mode="clip")

    def communicator(self, nccl: bool) -> Communicator:
        """Return the communicator to use, NCCL or not, where there is NCCL."""
        return self.comm if nccl else self.comm.over_cpu

    def send(self, array: Array) -> Reference:
        """Return a reference by which the master can open an array until the next command."""
        if isinstance(array, np.ndarray):
            placed = self.memory.place(np.ascontiguousarray(array))
        else:
            placed = self.memory.empty(array.shape, array.dtype)
            self.engine.read(array, placed)
        self.outbox.append(placed)
        return self.memory.reference(placed)

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def is_master(self) -> bool:
        return self.rank == self.master_rank

    def execute(self, payload: bytes) -> bytes:
        """Run the command in these bytes and return the bytes of the reply."""
        try:
            if payload != self._payload:  # the same call again is common
                self._command, self._payload = pickle.loads(payload), payload
            self.outbox.clear()
            self.memory.collect()  # a rank that allocates nothing any more would keep it
            return pickle.dumps((None, self._command.run(self)), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            if not isinstance(error, CollectiveAbortedError):
                self.transport.abort()
            return self.failure(error)

    def failure(self, error: Exception) -> bytes:
        """Return the bytes of the reply that says that this rank failed, and how."""
        aborted = isinstance(error, CollectiveAbortedError)
        try:
            message = str(error)
        except Exception as worse:  # a class of the user's
            message = f"(its message cannot be had: {type(worse).__name__})"
        status = aborted, type(error).__name__, message, traceback.format_exc()
        return pickle.dumps((status, None), pickle.HIGHEST_PROTOCOL)
