"""The interface of transports. ``tests/specifications/transport.py`` specifies it."""

from __future__ import annotations

import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from typing import Any, Callable, Protocol, Sequence

import numpy as np

from synkhronos.arithmetic.machines import Reading
from synkhronos.comms.base import Communicator, Group
from synkhronos.host.status import StatusPage
from synkhronos.stores.base import Store
from synkhronos.stores.handle import Needs


def do_nothing(*args: object) -> None:
    """Do nothing: the default of a function to call."""


class ServiceProcess(ABC):
    """The process or thread that `Transport.attend` started."""

    @abstractmethod
    def is_alive(self) -> bool:
        """Whether it still runs. Only the master knows."""

    @abstractmethod
    def end(self, grace: float) -> None:
        """Wait `grace` seconds for its end, then kill it."""


class OnDeath(Protocol):
    """What is done if workers die in a program that goes on without them."""

    def __call__(self, dead: dict[int, str]) -> None:
        """Handle the deaths of workers, with the cause of each."""

    def complaint(self) -> str | None:
        """Return why the world cannot be used after the program, if it cannot."""


class Transport(ABC):
    """Ranks ``0..size-1``, one of them the master: how they start, end, and send bytes.

    The master calls `start`, then `post` and `collect` for each command, and finally `close`. A worker
    calls `receive` and `reply` alternately. Inside a command all ranks call `barrier` and `exchange` in
    the same order. A rank that fails calls `abort` once.

    Attributes
    ----------
    rank, size, master_rank : int
        `rank` is the rank of the calling process or thread.
    timeout : float or None
        Seconds after which a wait for other ranks fails; None for no limit while every process lives.
    store : Store
        For arrays that other ranks access.
    inherits : bool
        Whether workers start with a copy of the whole state of the master, like a forked process. Their
        start is then deferred until the state is complete.
    forks_all : bool
        Whether all workers are forked from the process of the master, or are threads of it.
    can_replace : bool
        Whether it has `replace`.
    can_stay : bool
        Whether workers may stay in a command while the master goes on, which uses `check_waiting`.
    has_named_memory : bool
        Whether programs can use ``store.named_memory``, for arrays and locks that belong to no rank.
    is_home : bool
        Whether this rank's named memory hold the objects that exist in one place only, such as a center.
    machine : int
        The number of this rank's machine; the master's has the number 0.
    is_leader : bool
        Whether this rank communicates with other machines.
    ranks_here : int
        The number of ranks that share this machine, and therefore its cores.
    labels : sequence of int
        The number of each rank in messages to users.
    in_program : bool
        Whether this rank is inside a command in which ranks work at their own pace; see `begin_program`.
    overlap : OverlappedReduction or None
        Reduces vectors while this rank computes them, if another process can do so.
    is_copy : bool
        Whether the script, or an operation, has forked this process from the process of a rank. It may
        read the inherited state, and is ended when it goes on as that rank: see `end_copy`.
    posted : bool
        Whether another rank may have noticed the last `post` or `reply`, even if it raised.
    clock : callable
        Returns the time on this rank's machine in seconds.
    status : StatusPage or None
        The status of the ranks of this machine, which other processes can read.
    progress : memoryview or None
        The line of this rank in it, which commands write to.
    """

    rank: int
    size: int
    master_rank: int
    timeout: float | None
    store: Store
    inherits: bool
    forks_all: bool = True
    can_replace: bool = False
    can_stay: bool = False
    has_named_memory: bool = True
    is_home: bool = True
    machine: int = 0
    ranks_here: int
    labels: Sequence[int]
    is_copy: bool = False
    posted: bool = False
    in_program: bool = False
    _on_death: OnDeath | None = None
    overlap: Any = None
    status: StatusPage | None = None
    progress: memoryview | None = None
    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def end_copy(self) -> None:
        """End this process, with a message, if it is a copy of the process of a rank."""
        if not self.is_copy:
            return
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            sys.stdout.flush()
            os._exit(error.code or 0)  # as the script requested
        if error is not None:
            traceback.print_exc()
        sys.stderr.write(
            f"synkhronos: process {os.getpid()} was ended: an operation or a program has forked it on "
            f"rank {self.labels[self.rank]}, and it went on as that rank; end such a process by "
            f"os._exit(), also after an exception\n"
        )
        sys.stderr.flush()
        os._exit(1)

    @property
    def is_leader(self) -> bool:
        return self.rank == self.master_rank

    @property
    def distance(self) -> int:
        """The distance of this rank from the master, modulo `size`; 0 for the master itself."""
        return (self.rank - self.master_rank) % self.size

    @abstractmethod
    def communicator(self, group: Group | None = None) -> Communicator:
        """Return the fastest communicator for NumPy arrays of these ranks.

        Its ranks meet by `group`, by default by this transport.
        """

    @property
    def near(self) -> range:
        """The ranks that have the same named memory as this rank."""
        return range(self.size)

    def near_communicator(self, group: Group) -> Communicator:
        """Return the same for a group of ranks that are `near`."""
        return self.communicator(group)

    @abstractmethod
    def possible_sizes(self) -> range:
        """Return the sizes that a successor can have. Called when the workers have ended."""

    @abstractmethod
    def successor(self, size: int, master_rank: int) -> Transport:
        """Return a transport for new ranks, of a possible size, that uses the same store.

        The workers of this transport must have ended.
        """

    @abstractmethod
    def start(
        self,
        serve: Callable[[Transport], None],
        while_waiting: Callable[[], None] = do_nothing,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start the workers. Each calls ``serve(transport)``, with its own transport, and then ends.

        Parameters
        ----------
        serve : callable
            The loop of a worker.
        while_waiting : callable, optional
            Called by the master from time to time while it waits, from now on.
        pass_fds : sequence of int, optional
            The file descriptors of the script that forked workers keep in any case.

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
    def post(self, payload: bytes, needs: Needs | None = None) -> None:
        """Master: send the bytes of a command to every worker (the start barrier).

        Parameters
        ----------
        payload : bytes
            The command.
        needs : callable, optional
            ``needs(ranks, size)`` returns which of the arrays that the master has put into the store
            these ranks need for the command, a list of `RequiredRows`. A rank may be unable to get other
            arrays.

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
    def receive(self, when_idle: Callable[[], None] = do_nothing) -> bytes:
        """Worker: wait for a command and return its bytes.

        `when_idle` may be called, once, when it has waited for some time.
        """

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
        MissingRankError
            If a rank has ended the command without this call.
        """

    @abstractmethod
    def exchange(self, item: bytes) -> list[bytes]:
        """Return the bytes `item` of every rank, by rank. It is also a barrier, with the same errors."""

    @abstractmethod
    def abort(self) -> None:
        """Make the other ranks leave all barriers of this command with an error."""

    @abstractmethod
    def check(self) -> None:
        """Raise if the command cannot continue. It is called by a rank that is not waiting.

        Raises
        ------
        CollectiveAbortedError
            If a rank called `abort` in this command.
        WorldBrokenError
            In the master, if a worker died. All workers are ended first.
        """

    def check_waiting(self, waited: float) -> None:
        """Master: raise if it is useless to wait for the workers after these seconds.

        Raises
        ------
        WorldBrokenError
            If a worker died or the timeout expired. All workers are ended first.
        """
        raise NotImplementedError("only workers that share the memory of the master can stay")

    def begin_program(self, on_death: OnDeath | None = None) -> None:
        """From now until the end of this command, ranks work at their own pace.

        The finish barrier then has no time limit, but the waits of workers inside the command do.

        Parameters
        ----------
        on_death : OnDeath, optional
            If workers die, the rank that has forked them calls ``on_death({rank: cause})`` instead of
            ending all workers. It must call `replace` or `answer_for` for each of them, or raise.
        """
        self.in_program, self._on_death = True, on_death

    def _end_program(self) -> None:
        self.in_program, self._on_death = False, None

    def replace(self, rank: int, prepare: Callable[[bool], None]) -> None:
        """Master: start a new worker in place of a dead one.

        The new worker inherits the state of the master, which waits until ``prepare(takes_part)`` has
        returned in the worker. It then runs the current command, so `takes_part` is True, unless the
        dead worker had replied to it. If it dies before that, ``on_death`` is called again.
        """
        raise NotImplementedError("only workers that inherit the state of the master can be replaced")

    def answer_for(self, rank: int, payload: bytes) -> None:
        """Master: reply to the current command for a dead worker that is not replaced."""
        raise NotImplementedError("this transport has no workers that die alone")

    @abstractmethod
    def attend(self, name: str, serve: Callable[[], None]) -> ServiceProcess:
        """Master: run ``serve()`` concurrently with the ranks, where the store can be used.

        It runs in a process of its own if the ranks do, and ends with the master at the latest.
        """

    def relay(self) -> None:  # noqa: B027
        """Let machines exchange the contents of their named memory, until the end of this command."""

    def spread(self, flag: np.ndarray) -> None:  # noqa: B027
        """Let all ranks see a number in the named memory that any of them raises in this command."""

    def compare_clocks(self) -> list[Reading]:
        """Compare the master's clock with that of each machine: called by all ranks in a command.

        Returns
        -------
        list of Reading
            By machine, for the master; empty for other ranks, and if there is only one machine.
        """
        return []

    @abstractmethod
    def kill(self) -> None:
        """Master: kill the workers. A thread that waits for them gets a `WorldBrokenError`."""

    @abstractmethod
    def close(self, grace: float) -> None:
        """Master: wait `grace` seconds for the workers to end, then kill the others."""

    def release(self) -> None:  # noqa: B027
        """Master: give up the memory of the store. Nothing can be sent afterwards."""
