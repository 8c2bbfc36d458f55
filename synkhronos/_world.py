"""The world: the master and its workers, the barriers around their commands, and failures.

There is one world at a time, and it is the package's only mutable global.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import weakref
from typing import Any, Callable

import numpy as np

from synkhronos._errors import (
    REMEDY,
    ClosedError,
    CollectiveAbortedError,
    NotForkedError,
    SynkhronosError,
    WorkerError,
    WorldBrokenError,
)
from synkhronos._here import Command, Here
from synkhronos._interrupts import Hold, hold_ending
from synkhronos._typing import Finish, SharedVariable, Variable
from synkhronos.comms.base import Communicator
from synkhronos.engines.base import Engine
from synkhronos.transports.base import Transport
from synkhronos.transports.shm import SharedMemory

_CLOSING = 2.0  # seconds that a worker has to end by itself

_current: World | None = None


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
        self.interrupts = Hold(signal.SIGINT)
        self._turn = threading.Lock()  # of the thread whose command runs
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
        self._has_device = not self.here.engine.forks_late  # if not, there is nothing to enter
        self.started = False
        self.broken: str | None = None
        self.replicated_functions = 0
        self.replicated_shareds = 0
        self.unsent: dict[int, str] = {}  # functions that the workers lack, by number, and why
        self._last: tuple[Any, bytes] = None, b""  # the last command, and its bytes
        self.last_reduction: Any = None  # the command of the last reduction
        transport.while_waiting = self.interrupts.remind

    def renew(self, transport: Transport, comm: Communicator) -> None:
        """End the workers, and go on with other ones, which inherit all that the master has then.

        The transport works in the memory of the former one.
        """
        with hold_ending():
            self._take_turn()
            try:
                here, usable = self.here, self.broken is None
                self.give_up(f"a restart has begun, but has not ended; {REMEDY}")
                self._end_workers(usable)
                self._take_home()
                self._connect(transport, comm, here.engine)
                self.here.functions, self.here.shareds = here.functions, here.shareds
                self.here.files = here.files  # they may have lost their names since
                self.here.memory.trim_others()
            finally:
                self._turn.release()

    def start(self) -> None:
        """Start the workers; they inherit all that the master has by now."""
        if not self.started:
            with hold_ending():
                if self.size > 1:
                    self.here.engine.before_fork()
                    try:
                        self.transport.start(lambda: self.serve(self.here))
                    except WorldBrokenError as broken:
                        self.give_up(str(broken))
                        raise
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

        Ctrl-C waits until every rank is through; a second one does not.

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
        if self._has_device:
            self.here.engine.enter_thread()
        if self.size == 1:
            return [command.run(self.here)]
        with self.interrupts:
            self._take_turn()
            try:
                return self._run(command)
            finally:
                self._turn.release()

    def _take_turn(self):
        if not self._turn.acquire(False):
            raise SynkhronosError(
                "another call is not through yet, in another thread or under a signal handler; use the "
                "processes from one thread at a time"
            )

    def _run(self, command):
        if command is not self._last[0]:
            self._last = command, pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        own, error = None, None
        try:
            self.transport.post(self._last[1])
            try:
                own = command.run(self.here)
            except (WorldBrokenError, SystemExit, KeyboardInterrupt):
                raise
            except BaseException as raised:
                error = raised
                if not isinstance(raised, CollectiveAbortedError):
                    self.transport.abort()
            replies = self.transport.collect()
        except WorldBrokenError as broken:
            self.give_up(str(broken))
            raise
        except BaseException as raised:
            if self.transport.posted or not isinstance(raised, MemoryError):
                # Interrupted between the barriers: ranks may be out of step from here on.
                self.give_up(f"a command was interrupted; the workers were ended; {REMEDY}")
                self.transport.kill()
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
        if self.here.rank != self.master_rank and self.here.memory.is_ours():
            raise SynkhronosError(
                f"close(): this process is rank {self.here.rank}, a worker; only the master can close"
            )
        with hold_ending():
            alone, usable = self._turn.acquire(False), self.broken is None
            self.give_up("close() has begun, but has not ended; if it was interrupted, call it again")
            try:
                if not alone:  # a thread is in the middle of a command: it has to leave
                    self.transport.kill()
                    alone, usable = self._turn.acquire(timeout=_CLOSING), False
                self._end_workers(usable)
            finally:
                try:
                    self._let_go()
                finally:
                    if alone:
                        self._turn.release()

    def _let_go(self):
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
