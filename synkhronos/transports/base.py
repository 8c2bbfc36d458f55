"""The interface of transports. `naive` is the specification; ``tests/checks`` has the checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Callable

from synkhronos.comms.base import Communicator
from synkhronos.stores.base import Store


class Transport(ABC):
    """Ranks ``0..size-1``, one of them the master: how they start, end, and send bytes.

    The master calls `start`, then `post` and `collect` for each command, and finally `close`. A worker
    calls `receive` and `reply` alternately. Inside a command all ranks call `barrier` and `exchange` in
    the same order. A rank that fails calls `abort` once.

    Attributes
    ----------
    rank, size, master_rank : int
        `rank` is the rank of the calling process or thread.
    store : Store
        For arrays that other ranks access.
    inherits : bool
        Whether workers start with a copy of the whole state of the master, like a forked process. Their
        start is then deferred until the state is complete.
    ranks_here : int
        The number of ranks that share this machine, and so its cores.
    while_waiting : callable
        Called by the master from time to time while it waits.
    posted : bool
        Whether another rank may have noticed the last `post` or `reply`, even if it raised.
    """

    rank: int
    size: int
    master_rank: int
    store: Store
    inherits: bool
    ranks_here: int
    while_waiting: Callable[[], None] = staticmethod(lambda: None)
    posted: bool = False

    @property
    def distance(self) -> int:
        """The distance of this rank from the master, modulo `size`; 0 for the master itself."""
        return (self.rank - self.master_rank) % self.size

    @abstractmethod
    def communicator(self) -> Communicator:
        """Return the fastest communicator for NumPy arrays of these ranks."""

    @abstractmethod
    def successor(self, size: int, master_rank: int) -> Transport:
        """Return a transport for new ranks that uses the same store.

        The workers of this transport must end before `start` of the new one is called.
        """

    @abstractmethod
    def start(self, serve: Callable[[Transport], None]) -> None:
        """Start the workers. Each calls ``serve(transport)``, with its own transport, and then ends.

        Raises
        ------
        WorldBrokenError
            If a worker died or the timeout expired. All workers are ended first.
        """

    @abstractmethod
    def is_master_process(self) -> bool:
        """Whether this process is the master, and not a process forked from it."""

    @abstractmethod
    def is_worker_process(self) -> bool:
        """Whether this process is a worker, and not a process forked from it."""

    @abstractmethod
    def post(self, payload: bytes) -> None:
        """Master: send the bytes of a command to every worker (the start barrier).

        Raises
        ------
        MemoryError
            If there is no room for the bytes. No worker has been notified then.
        """

    @abstractmethod
    def collect(self) -> list[bytes | None]:
        """Master: return the replies by rank, None for the master itself (the finish barrier).

        Raises
        ------
        WorldBrokenError
            If a worker died or the timeout expired. All workers are ended first.
        """

    @abstractmethod
    def receive(self) -> bytes:
        """Worker: wait for a command and return its bytes."""

    @abstractmethod
    def reply(self, payload: bytes) -> None:
        """Worker: send the bytes of the reply to the master.

        Raises
        ------
        MemoryError
            If there is no room for the bytes. The master has not been notified then.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called this method.

        Raises
        ------
        CollectiveAbortedError
            If a rank called `abort` in the same command.
        """

    @abstractmethod
    def exchange(self, item: bytes) -> list[bytes]:
        """Return the bytes `item` of every rank, by rank. It is also a barrier, with the same errors."""

    @abstractmethod
    def abort(self) -> None:
        """Make the other ranks leave all barriers of this command with an error."""

    @abstractmethod
    def kill(self) -> None:
        """Master: kill the workers. A thread that waits for them gets a `WorldBrokenError`."""

    @abstractmethod
    def close(self, grace: float) -> None:
        """Master: wait `grace` seconds for the workers to end, then kill the remaining ones."""
