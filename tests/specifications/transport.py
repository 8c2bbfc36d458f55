"""The transport as an executable specification: ranks are threads of one process.

Workers inherit nothing, as on another machine; everything is sent to them. A thread cannot be killed, so
a worker ends the next time it waits.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Callable, Collection, Sequence

from synkhronos._errors import (
    REMEDY,
    CollectiveAbortedError,
    MissingRankError,
    SynkhronosError,
    WorldBrokenError,
)
from specifications.communicator import NaiveCommunicator
from specifications.store import NaiveStore
from synkhronos.transports.base import ServiceProcess, Transport, do_nothing

if TYPE_CHECKING:
    from synkhronos.comms.base import Group
    from synkhronos.stores.handle import Needs


class _Ranks:
    """The state that the ranks' transports share."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.commands: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in range(size)]
        self.replies: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in range(size)]
        self.threads: dict[int, threading.Thread] = {}
        self.reset()

    def reset(self) -> None:
        """Start a command: no rank has reached a meeting yet."""
        # The items of each meeting, by rank
        self.meetings: dict[int, dict[int, bytes]] = {}
        # By finished rank: how many meetings it took part in
        self.finished: dict[int, int] = {}
        self.aborted = self.ended = False

    def abort(self) -> None:
        """Let all ranks leave the meetings of this command."""
        with self.changed:
            self.aborted = True
            self.changed.notify_all()

    def end(self) -> None:
        """Let the workers end the next time they wait."""
        threads, self.threads = self.threads, {}
        with self.changed:
            self.ended = True
            self.changed.notify_all()
        for rank in threads:
            self.commands[rank].put(None)


class NaiveTransport(Transport):
    """The transport of one rank.

    A barrier fails after `timeout` seconds. The store may be that of a former transport, and `labels`
    have the numbers of ranks in messages to users.
    """

    store: NaiveStore
    inherits = False
    _while_waiting: Callable[[], None] = staticmethod(do_nothing)

    def __init__(
        self,
        size: int,
        master_rank: int = 0,
        timeout: float | None = None,
        store: NaiveStore | None = None,
        labels: Sequence[int] | None = None,
    ) -> None:
        self.size = self.ranks_here = size
        self.labels = range(size) if labels is None else labels
        self.rank = self.master_rank = master_rank
        self.timeout = timeout
        self.store = NaiveStore(size) if store is None else store
        self._ranks = _Ranks(size)
        self._passed = 0  # meetings of this command
        self._pid = os.getpid()

    def communicator(self, group: Group | None = None) -> NaiveCommunicator:
        return NaiveCommunicator(self if group is None else group)

    def possible_sizes(self) -> range:
        return range(1, self.store.ranks + 1)

    def successor(self, size: int, master_rank: int) -> NaiveTransport:
        return NaiveTransport(size, master_rank, self.timeout, self.store)

    def start(
        self,
        serve: Callable[[Transport], None],
        while_waiting: Callable[[], None] = do_nothing,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._while_waiting = while_waiting
        for rank in range(self.size):
            if rank != self.rank:
                own = NaiveTransport(self.size, self.master_rank, self.timeout, self.store, self.labels)
                own.rank, own._ranks = rank, self._ranks
                thread = threading.Thread(
                    target=own._serve, args=(serve,), name=f"synkhronos-{rank}", daemon=True
                )
                self._ranks.threads[rank] = thread
                thread.start()

    def _serve(self, serve: Callable[[Transport], None]) -> None:
        with contextlib.suppress(SystemExit):
            serve(self)

    def is_master_process(self) -> bool:
        return self.rank == self.master_rank and os.getpid() == self._pid

    def is_worker_process(self) -> bool:
        return self.rank != self.master_rank and os.getpid() == self._pid

    # Between master and workers

    def post(self, payload: bytes, needs: Needs | None = None) -> None:
        self._passed = 0
        self._ranks.reset()
        self.posted = True
        self._end_program()
        for rank in self._ranks.threads:
            self._ranks.commands[rank].put(payload)

    def collect(self) -> list[bytes | None]:
        began = time.monotonic()
        self._ranks.finished[self.rank] = self._passed
        replies: list[bytes | None] = [None] * self.size
        for rank in self._ranks.threads:
            while replies[rank] is None:
                try:
                    replies[rank] = self._ranks.replies[rank].get(timeout=0.02)
                except queue.Empty:
                    self._check(rank, began)
        return replies

    def _check(self, rank: int, began: float) -> None:
        """Raise `WorldBrokenError` if a worker has ended or the timeout has expired."""
        self._while_waiting()
        dead = [rank for rank, thread in self._ranks.threads.items() if not thread.is_alive()]
        cause = f"a worker died: rank {self.labels[dead[0]]}" if dead else None
        if self._ranks.ended:
            cause = "the workers were ended from another thread"
        elif cause is None and self._is_late(began):
            late = self.labels[rank]
            cause = f"a barrier lasted longer than fork(timeout={self.timeout}) seconds, for rank {late}"
        if cause is not None:
            self.kill()
            raise WorldBrokenError(f"{cause}; every worker was ended; {REMEDY}")

    def _is_late(self, began: float) -> bool:
        if self.timeout is None or time.monotonic() - began <= self.timeout:
            return False
        is_collecting = self.rank in self._ranks.finished
        return not (self.in_program and is_collecting) or self._ranks.aborted

    def receive(self, when_idle: Callable[[], None] = do_nothing) -> bytes:
        self._passed = 0
        self._end_program()
        payload = self._ranks.commands[self.rank].get()
        if payload is None:
            raise SystemExit
        return payload

    def reply(self, payload: bytes) -> None:
        self.posted = True
        self._ranks.finished[self.rank] = self._passed
        self._ranks.replies[self.rank].put(payload)

    # Among all ranks

    def barrier(self) -> None:
        self.exchange(b"")

    def exchange(self, item: bytes) -> list[bytes]:
        began, ranks = time.monotonic(), self._ranks
        self._passed += 1
        with ranks.changed:
            items = ranks.meetings.setdefault(self._passed, {})
            items[self.rank] = item
            ranks.changed.notify_all()
            while len(items) < self.size:
                if ranks.ended and self.rank != self.master_rank:
                    raise SystemExit
                if ranks.aborted:
                    raise CollectiveAbortedError(
                        f"rank {self.labels[self.rank]} left a collective: another rank failed in this "
                        f"command"
                    )
                self._check_missing(items)
                ranks.changed.wait(0.02)
                missing = set(range(self.size)) - set(items)
                if missing and self.rank == self.master_rank:
                    self._check(min(missing), began)
                elif missing and self.in_program and self._is_late(began):
                    raise SynkhronosError(
                        f"rank {self.labels[self.rank]} waited longer than fork(timeout={self.timeout}) "
                        f"seconds inside a program, for rank {self.labels[min(missing)]}"
                    )
        return [items[rank] for rank in range(self.size)]

    def _check_missing(self, items: Collection[int]) -> None:
        """Raise if a rank has ended the command and will never come to this meeting."""
        for rank, passed in list(self._ranks.finished.items()):
            if rank not in items and passed < self._passed:
                raise MissingRankError(
                    f"rank {self.labels[self.rank]} waits in a collective for rank {self.labels[rank]}, "
                    f"which ended the program without it; let every rank call the same collectives in "
                    f"the same order"
                )

    def abort(self) -> None:
        self._ranks.abort()

    def check(self) -> None:
        if self._ranks.aborted:
            raise CollectiveAbortedError(
                f"rank {self.labels[self.rank]} left the program: another rank failed in it"
            )
        if self.rank == self.master_rank:
            self._check(self.rank, time.monotonic())
        elif self._ranks.ended:
            raise SystemExit

    def attend(self, name: str, serve: Callable[[], None]) -> ServiceProcess:
        return _Thread(name, serve)

    # Ending

    def kill(self) -> None:
        self._ranks.end()

    def close(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        for thread in self._ranks.threads.values():
            thread.join(max(0, deadline - time.monotonic()))
        self.kill()


class _Thread(ServiceProcess):
    """A thread; it cannot be killed."""

    def __init__(self, name: str, serve: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=serve, name=f"synkhronos-{name}", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def end(self, grace: float) -> None:
        self._thread.join(grace)
