"""Messages between machines in one process, as an executable specification."""

from __future__ import annotations

import collections
import pickle
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from synkhronos.machines.progress_process import ProgressProcess, Work, WorkContext
from synkhronos.machines.leaders import Links, Receipt, as_bytes

if TYPE_CHECKING:
    from synkhronos.stores.named_memory import NamedMemory


class NaiveNetwork:
    """The queues of the messages among `size` leaders, which are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.queues: dict[tuple[int, int, int], collections.deque[bytes]] = collections.defaultdict(
            collections.deque
        )
        self.lost: set[int] = set()

    def links(self) -> list[NaiveLinks]:
        """Return the `Links` of each leader."""
        return [NaiveLinks(self, rank) for rank in range(self.size)]


class NaiveLinks(Links):
    """The links of one leader. A message is copied when it is sent."""

    def __init__(self, network: NaiveNetwork, rank: int) -> None:
        self._network = network
        self.rank, self.size = rank, network.size
        self._acknowledged: set[int] = set()

    def lost(self) -> set[int]:
        return self._network.lost

    def acknowledge(self) -> None:
        self._acknowledged |= self.lost()

    def send(self, to: int, tag: int, data: bytes | np.ndarray) -> int:
        if to in self.lost():
            raise self.lost_error()
        with self._network.lock:
            self._network.queues[self.rank, to, tag].append(as_bytes(data).tobytes())
        return 0

    def is_sent(self, number: int) -> bool:
        return True

    def receive(self, source: int | None, tag: int) -> tuple[int, bytes] | None:
        with self._network.lock:
            for one in range(self.size) if source is None else [source]:
                queue = self._network.queues[one, self.rank, tag]
                if queue:
                    return one, queue.popleft()
        if source in self.lost() or source is None and self.lost() - self._acknowledged:
            raise self.lost_error()
        return None

    def receive_into(self, source: int, tag: int, array: np.ndarray) -> Receipt:
        return _NaiveReceipt(self, source, tag, array)

    def discard(self, tag: int) -> None:
        while self.receive(None, tag) is not None:
            pass


class _NaiveReceipt(Receipt):
    def __init__(self, links: NaiveLinks, source: int, tag: int, array: np.ndarray) -> None:
        self._links, self._source, self._tag = links, source, tag
        self._array: np.ndarray | None = array

    def is_complete(self) -> bool:
        if self._array is not None:
            received = self._links.receive(self._source, self._tag)
            if received is None:
                return False
            as_bytes(self._array)[...] = np.frombuffer(received[1], np.uint8)
            self._array = None
        return True

    def cancel(self) -> None:
        self._array = None


class NaiveProgressProcess(ProgressProcess):
    """A progress process that is a thread."""

    def __init__(self, named_memory: NamedMemory, links: Links) -> None:
        self.named_memory, self._links = named_memory, links
        self._wanted = 0
        self._thread: threading.Thread | None = None
        self._kept: dict[str, Any] = {}

    def start(self, number: int, work: Work) -> None:
        def run() -> None:
            is_over = lambda: self._wanted != number  # noqa: E731
            try:
                work.run(WorkContext(self.named_memory, self._links, number, is_over, kept=self._kept))
            finally:
                self.named_memory.release_locks()

        self._wanted, work = number, pickle.loads(pickle.dumps(work))
        self._thread = threading.Thread(target=run, name="synkhronos-progress process", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._wanted = 0

    def has_stopped(self) -> bool:
        return self._thread is None or not self._thread.is_alive()
