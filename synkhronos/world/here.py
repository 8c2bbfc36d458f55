"""What a command is, and what it finds on the rank where it runs.

A command is an object with one method, ``run(here)``. The master makes it, the transport sends it to
every worker, each rank runs it on its own state `here`, and what ``run`` returns, or the exception that
it raises, is sent back to the master at the finish barrier. A public function and its command are in
the same module; there is no other list of what a worker can do.
"""

from __future__ import annotations

import math
import pickle
import traceback
from abc import ABC, abstractmethod
from typing import Any, Hashable

import numpy as np

from synkhronos._errors import CollectiveAbortedError
from synkhronos._typing import Array, Rows, SharedVariable
from synkhronos.comms.base import Communicator
from synkhronos.engines.base import Engine
from synkhronos.stores.handle import Handle
from synkhronos.transports.base import Transport


class Command(ABC):
    """Something that every rank does. Keep it small: it is pickled for each call."""

    @abstractmethod
    def run(self, here: Here) -> Any:
        """Do it with the state of this rank, and return what the master needs to know."""


class Here:
    """A rank's own state: what a command finds where it runs.

    Attributes
    ----------
    transport : Transport
    store : Store
    comm : Communicator
    engine : Engine
    rank, size, master_rank : int
    functions : list of Replica
        This rank's part of each replicated function, by number.
    shareds : list of shared variables
        This rank's replicas, by number.
    rows : dict
        How many rows each function, by number, had in its last call on this rank.
    sent : list
        What keeps the arrays alive that this rank has sent; emptied at the next command.
    log : object or None
        What is measured, inside a `profile` block.
    """

    def __init__(self, transport: Transport, engine: Engine) -> None:
        self.transport = transport
        self.store = transport.store
        self.comm = transport.communicator()
        self.engine = engine
        self.size = transport.size
        self.master_rank = transport.master_rank
        self.functions: list[Any] = []
        self.shareds: list[SharedVariable] = []
        self.rows: dict[int, int] = {}
        self.sent: list[Any] = []
        self.log: Any = None
        self._buffers: dict[Hashable, np.ndarray] = {}
        self._payload: bytes | None = None
        self._command: Any = None

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def is_master(self) -> bool:
        return self.rank == self.master_rank

    @property
    def stream_index(self) -> int:
        """Which of the independent random streams is this rank's: 0, the script's, for the master."""
        return self.transport.distance

    def take(self, key: Hashable, source: Array | Handle, rows: Rows) -> Array:
        """Return rows of an array, or of the array of a handle.

        A ``range`` of rows is a view; other rows are copied to a buffer, which is kept for the next
        call with the same `key`.
        """
        if isinstance(source, Handle):
            return self.store.rows(source, rows, self._buffer(key, source, rows))
        out = self._buffer(key, source, rows) if isinstance(source, np.ndarray) else None
        return self.engine.take(source, rows, out)

    def _buffer(self, key, source, rows):
        """Return an array for a copy of rows; None if they need no copy."""
        if type(rows) is range:
            return None
        shape = (len(rows), *source.shape[1:])
        size = math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < size or buffer.dtype != source.dtype:
            buffer = self._buffers[key] = np.empty(size, source.dtype)
        return buffer[:size].reshape(shape)

    def communicator(self, nccl: bool) -> Communicator:
        """Return the communicator to use: NCCL, if there is one and it may be used."""
        return self.comm if nccl else self.comm.over_cpu

    def send(self, array: Array) -> Handle:
        """Return a handle by which the master can get an array until the next command."""
        if not isinstance(array, np.ndarray):
            on_device, array = array, self.store.empty(array.shape, array.dtype)
            self.engine.read(on_device, array)
        handle = self.store.put(array)
        self.sent.append((array, handle))
        return handle

    def execute(self, payload: bytes) -> bytes:
        """Run the command in these bytes and return the bytes of the reply."""
        try:
            if payload != self._payload:  # the same call is often repeated
                self._command, self._payload = pickle.loads(payload), payload
            self.sent.clear()
            self.store.collect()  # a rank that allocates nothing any more would not do it otherwise
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
        except Exception as worse:  # raised by a class of the user's
            message = f"(str() of the exception raised {type(worse).__name__})"
        status = aborted, type(error).__name__, message, traceback.format_exc()
        return pickle.dumps((status, None), pickle.HIGHEST_PROTOCOL)
