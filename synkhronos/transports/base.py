"""What a transport must do. `naive` says it in the fewest words; ``tests/checks`` conforms it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Callable

from synkhronos.comms.base import Communicator
from synkhronos.stores.base import Store


class Transport(ABC):
    """Ranks ``0..size-1``, one of them the master: how they start, end, and send bytes.

    The master calls `start`, then `post` and `collect` for each command, and finally `close`. A worker
    calls `receive` and `reply` in turn. Inside a command any rank calls `barrier` and `exchange`, all
    ranks the same ones in the same order, or `abort`, once, if it fails.

    Attributes
    ----------
    rank, size, master_rank : int
        `rank` is that of the process, or thread, that calls.
    store : Store
        For arrays that other ranks shall reach.
    inherits : bool
        Whether workers start with a copy of the whole state of the master, as a forked process does.
        They are then better started late, when the state is complete.
    ranks_here : int
        How many of the ranks share this machine, and so its cores.
    while_waiting : callable
        Called by the master now and then while it waits.
    posted : bool
        Whether another rank may know of the last `post` or `reply`, even if that has raised.
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
        """How many ranks this one is after the master, counted around: 0 for the master itself."""
        return (self.rank - self.master_rank) % self.size

    @abstractmethod
    def communicator(self) -> Communicator:
        """Return the fastest communicator for NumPy arrays of these ranks."""

    @abstractmethod
    def successor(self, size: int, master_rank: int) -> Transport:
        """Return a transport for new ranks, in the same store.

        The workers of this one have ended, or will have before the other's `start`.
        """

    @abstractmethod
    def start(self, serve: Callable[[Transport], None]) -> None:
        """Start every worker. It calls ``serve(transport)``, its own, and ends when that returns.

        Raises
        ------
        WorldBrokenError
            If a worker died at once or the time-out passed; every worker is ended first.
        """

    @abstractmethod
    def is_master_process(self) -> bool:
        """Whether this process is the master's, and not one that was forked from it."""

    @abstractmethod
    def is_worker_process(self) -> bool:
        """Whether this process is a worker's, and not one that was forked from it."""

    @abstractmethod
    def post(self, payload: bytes) -> None:
        """Master: send the bytes of a command to every worker (the start barrier).

        Raises
        ------
        MemoryError
            If there is no room for the bytes; no worker has been told anything then.
        """

    @abstractmethod
    def collect(self) -> list[bytes | None]:
        """Master: return every rank's reply, None for its own (the finish barrier).

        Raises
        ------
        WorldBrokenError
            If a worker died or the time-out passed; every worker is ended first.
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
            If there is no room for the bytes; the master has not been told anything then.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called this.

        Raises
        ------
        CollectiveAbortedError
            If a rank called `abort` in the same command.
        """

    @abstractmethod
    def exchange(self, item: bytes) -> list[bytes]:
        """Return the bytes `item` of every rank, by rank. It is a barrier too, and raises the same."""

    @abstractmethod
    def abort(self) -> None:
        """Make the others leave the barrier where they wait, or will wait, in this command."""

    @abstractmethod
    def kill(self) -> None:
        """Master: end the workers at once. A thread that waits for them gets `WorldBrokenError`."""

    @abstractmethod
    def close(self, grace: float) -> None:
        """Master: end the workers; those that are not gone after `grace` seconds are killed."""
