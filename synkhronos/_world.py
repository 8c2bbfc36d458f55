"""The world: the master, its workers, and the commands that all of them run.

A command is an object with one method, ``run(here)``. The master makes it, the transport brings it to
every worker, each rank runs it on its own state `here`, and what ``run`` returns, or the exception that
it raises, comes back to the master with the finish barrier. The public function and its command stand
together in one module; there is no other list of what a worker can do.

There is one world at a time, and it is the package's only mutable global.
"""

from __future__ import annotations

import math
import os
import pickle
import traceback
import weakref
from typing import Any, Callable, Hashable

import numpy as np

from synkhronos._errors import (
    REMEDY,
    ClosedError,
    CollectiveAbortedError,
    NotForkedError,
    WorkerError,
    WorldBrokenError,
)
from synkhronos._partition import as_slice
from synkhronos._typing import Array, Finish, Reference, Rows, SharedVariable, Variable
from synkhronos.comms.base import Communicator
from synkhronos.engines.base import Engine
from synkhronos.transports.base import Transport
from synkhronos.transports.shm import SharedMemory

_CLOSING = 2.0  # seconds that a worker has to end by itself

_current: World | None = None


class Command:
    """Something that every rank does. Keep it small: it is pickled for each call."""

    def run(self, here: Here) -> Any:
        """Do it, with the state of this rank, and return what the master needs of it."""
        raise NotImplementedError


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
        if type(rows) is range:
            return array[as_slice(rows)]
        shape = (len(rows), *array.shape[1:])
        size = math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < size or buffer.dtype != array.dtype:
            buffer = self._buffers[key] = np.empty(size, array.dtype)
        # The rows were checked in the master; the mode "raise" would go through another buffer.
        return np.take(array, rows, axis=0, out=buffer[:size].reshape(shape), mode="clip")

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
            return pickle.dumps((None, self._command.run(self)), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            if not isinstance(error, CollectiveAbortedError):
                self.transport.abort()
            status = type(error).__name__, str(error), traceback.format_exc()
            aborted = isinstance(error, CollectiveAbortedError)
            return pickle.dumps(((aborted, *status), None), pickle.HIGHEST_PROTOCOL)


class World:
    """The ranks of one ``fork()``, seen from the master.

    Parameters
    ----------
    transport : Transport
    comm : Communicator
    engine : Engine
    serve : callable
        ``serve(here)`` is what a worker does from its start to its end.
    """

    def __init__(
        self,
        transport: Transport,
        comm: Communicator,
        engine: Engine,
        serve: Callable[[Here], None],
    ) -> None:
        self.serve = serve
        self.closed = False
        self._connect(transport, comm, engine)
        self.shared_numbers: dict[SharedVariable, int] = {}
        self.bound: dict[Variable, Any] = {}  # Data by the variable that it is bound to
        self.fused: Any = None  # the commands gathered by an open `fuse()`
        self.datas: weakref.WeakSet[Any] = weakref.WeakSet()
        self.on_close: Callable[[], None] = lambda: None
        #: ``connect(size, master_rank, memory)`` returns what `renew` takes.
        self.connect: Callable[[int, int, SharedMemory], tuple[Transport, Communicator]]

    def _connect(self, transport, comm, engine):
        self.transport = transport
        self.here = Here(transport, comm, engine)
        self.size = transport.size
        self.master_rank = transport.master_rank
        self.started = False
        self.broken: str | None = None
        self.replicated_functions = 0
        self.replicated_shareds = 0
        self._last: tuple[Any, bytes] = None, b""  # the last command, and its bytes
        self.last_reduction: Any = None  # the command of the last reduction

    def renew(self, transport: Transport, comm: Communicator) -> None:
        """End the workers, and go on with other ones, which inherit all that the master has then.

        The transport works in the memory of the former one.
        """
        here, usable = self.here, self.broken is None
        self.give_up(f"a restart was interrupted; {REMEDY}")  # if it is
        self._end_workers(usable)
        self._take_home()
        self._connect(transport, comm, here.engine)
        self.here.functions, self.here.shareds = here.functions, here.shareds
        self.here.memory.trim_others()

    def start(self) -> None:
        """Start the workers; they inherit all that the master has by now."""
        if not self.started:
            if self.size > 1:
                self.here.engine.before_fork()
                self.transport.start(lambda: self.serve(self.here))
            self.started = True

    def check_usable(self) -> None:
        """Raise if no command can run in this world any more."""
        if self.closed:
            raise ClosedError("this world was closed; call synk.fork() to make a new one")
        if self.broken is not None:
            raise WorldBrokenError(self.broken)

    def number_shared(self, shared: SharedVariable) -> None:
        """Give a shared variable the number by which every rank knows it, if it has none."""
        if shared not in self.shared_numbers:
            self.shared_numbers[shared] = len(self.here.shareds)
            self.here.shareds.append(shared)

    def give_up(self, reason: str) -> None:
        """Refuse every command from here on, for this reason."""
        self.broken = reason

    def submit(self, command: Command, finish: Finish) -> Any:
        """Run a command and return ``finish(results by rank)``; inside ``fuse()``, later."""
        if self.fused is None:
            return finish(self.run(command))
        return self.fused.add(command, finish)

    def run(self, command: Command) -> list:
        """Let every rank run the command; return what each returned, by rank.

        Raises
        ------
        WorkerError
            If a worker raised.
        WorldBrokenError
            If a worker died.
        Exception
            What the command raised in the master itself.
        """
        self.check_usable()
        if self.size == 1:
            return [command.run(self.here)]
        if command is not self._last[0]:
            self._last = command, pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        try:
            self.transport.post(self._last[1])
            own, error = None, None
            try:
                own = command.run(self.here)
            except (WorldBrokenError, SystemExit):
                raise
            except BaseException as raised:  # KeyboardInterrupt, too: the workers finish first
                error = raised
                if not isinstance(raised, CollectiveAbortedError):
                    self.transport.abort()
            replies = self.transport.collect()
        except WorldBrokenError as broken:
            self.give_up(str(broken))
            raise
        except BaseException:
            # Interrupted between the barriers: ranks may be out of step from here on.
            self.give_up(f"a command was interrupted; the workers were ended; {REMEDY}")
            self.transport.close(0)
            raise
        results, failures = self._read(replies)
        if error is not None and not isinstance(error, CollectiveAbortedError):
            raise error
        if failures:
            raise self._first_cause(failures) from error
        if error is not None:
            raise error
        results[self.master_rank] = own
        return results

    def _read(self, replies):
        results, failures = [None] * self.size, []
        for rank, reply in enumerate(replies):
            if reply is not None:
                status, results[rank] = pickle.loads(reply)
                if status is not None:
                    failures.append((rank, *status))
        return results, failures

    def _first_cause(self, failures):
        """Return the error of the first rank that failed by itself, not because of another."""
        rank, _, *cause = min(failures, key=lambda failure: failure[1])
        return WorkerError(rank, *cause)

    def close(self) -> None:
        """End the workers and give everything back that this world holds."""
        if self.closed:
            return
        try:
            self._end_workers(self.broken is None)
        finally:
            for data in list(self.datas):
                data.free_memory()
            self._take_home()
            self.here.comm = None  # type: ignore[assignment]  # it remembers arrays
            self.here.memory.trim()
            self.here.memory.trim_others()
            self.on_close()
            self.closed = True

    def _end_workers(self, usable):
        try:
            if self.started and self.size > 1 and usable:
                self.transport.post(b"")
        finally:
            self.transport.close(_CLOSING)

    def _take_home(self):
        """Move the master's replicas out of the shared memory, to be its own.

        That memory is about to be given back, or workers that are forked shall get copies.
        """
        for shared in self.here.shareds:
            storage = self.here.engine.storage(shared)
            if isinstance(storage, np.ndarray) and storage in self.here.memory:
                self.here.engine.store(shared, storage.copy())


def current() -> World:
    """Return the one world, or raise if there is none that can be used."""
    if _current is None:
        raise NotForkedError("no processes yet: call synk.fork() first")
    if _current.closed:
        raise ClosedError("the processes were closed: call synk.fork() again first")
    return _current


def exists() -> bool:
    """Whether there is a world that is not closed."""
    return _current is not None and not _current.closed


def _refuse_in_child():
    """A process that the script forks has the world's objects, but must leave its ranks alone."""
    if exists():
        _current.give_up("this process was forked from the master; only that one may use the ranks")


os.register_at_fork(after_in_child=_refuse_in_child)


def enter(world: World) -> None:
    """Make this the one world."""
    global _current
    _current = world
