"""What a transport must do: start the ranks, and bring bytes from one to another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Callable

from synkhronos.transports.shm import SharedMemory


class Transport(ABC):
    """Ranks ``0..size-1``, one of them the master.

    The master calls `start`, then for each command `post` and `collect`, at last `close`. A worker
    calls `receive` and `reply` in turn. Inside a command any rank calls `barrier` and `exchange`, all
    ranks the same ones in the same order, or `abort`, once, if it fails.

    Attributes
    ----------
    rank, size, master_rank : int
        `rank` is this process's own.
    memory : SharedMemory
        What ranks on one machine have in common.
    while_waiting : callable
        What the master calls now and then as it waits.
    posted : bool
        Whether another rank may know of the last `post` or `reply`, also if that has failed.
    """

    rank: int
    size: int
    master_rank: int
    memory: SharedMemory
    while_waiting: Callable[[], None] = staticmethod(lambda: None)
    posted: bool = False

    @abstractmethod
    def start(self, serve: Callable[[], None]) -> None:
        """Start every worker; in it ``serve()`` is called and the worker ends as that returns.

        Raises
        ------
        WorldBrokenError
            If a worker died at once or the time-out passed; every worker is ended first.
        """

    @abstractmethod
    def is_master_process(self) -> bool:
        """Whether this process is the one that made the world, and no fork of it."""

    @abstractmethod
    def post(self, payload: bytes) -> None:
        """Master: bring the bytes of a command to every worker (the start barrier).

        Raises
        ------
        MemoryError
            If there is no room for the bytes; no worker was told anything then.
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
        """Worker: bring the bytes of the reply to the master."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here.

        Raises
        ------
        CollectiveAbortedError
            If a rank called `abort` in the same command.
        """

    @abstractmethod
    def exchange(self, item: bytes) -> list[bytes]:
        """Return the bytes `item` of every rank, by rank. A barrier, too; raises what it raises."""

    @abstractmethod
    def abort(self) -> None:
        """Make the others leave the barrier that they wait at, or will wait at, in this command."""

    @abstractmethod
    def kill(self) -> None:
        """Master: end the workers at once. A thread that waits for them gets `WorldBrokenError`."""

    @abstractmethod
    def close(self, grace: float) -> None:
        """Master: end the workers; those that do not end within `grace` seconds are killed."""
