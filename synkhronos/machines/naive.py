"""Messages between machines and their couriers in one process, as an executable specification."""

from __future__ import annotations

import collections
import pickle
import threading

import numpy as np

from synkhronos.machines.courier import Courier, WorkContext
from synkhronos.machines.links import Links, Receipt, as_bytes


class NaiveNetwork:
    """The queues of the messages among `size` leaders, which are threads."""

    def __init__(self, size):
        self.size = size
        self.lock = threading.Lock()
        self.queues = collections.defaultdict(collections.deque)
        self.lost = set()

    def links(self):
        """Return the `Links` of each leader."""
        return [NaiveLinks(self, rank) for rank in range(self.size)]


class NaiveLinks(Links):
    """The links of one leader. A message is copied when it is sent."""

    def __init__(self, network, rank):
        self._network = network
        self.rank, self.size = rank, network.size
        self._acknowledged = set()

    def lost(self):
        return self._network.lost

    def acknowledge(self):
        self._acknowledged |= self.lost()

    def send(self, to, tag, data):
        if to in self.lost():
            raise self.lost_error()
        with self._network.lock:
            self._network.queues[self.rank, to, tag].append(as_bytes(data).tobytes())
        return 0

    def is_sent(self, number):
        return True

    def receive(self, source, tag):
        with self._network.lock:
            for one in range(self.size) if source is None else [source]:
                queue = self._network.queues[one, self.rank, tag]
                if queue:
                    return one, queue.popleft()
        if source in self.lost() or source is None and self.lost() - self._acknowledged:
            raise self.lost_error()
        return None

    def receive_into(self, source, tag, array):
        return _NaiveReceipt(self, source, tag, array)

    def discard(self, tag):
        while self.receive(None, tag) is not None:
            pass


class _NaiveReceipt(Receipt):
    def __init__(self, links, source, tag, array):
        self._links, self._source, self._tag, self._array = links, source, tag, array

    def is_complete(self):
        if self._array is not None:
            received = self._links.receive(self._source, self._tag)
            if received is None:
                return False
            as_bytes(self._array)[...] = np.frombuffer(received[1], np.uint8)
            self._array = None
        return True

    def cancel(self):
        self._array = None


class NaiveCourier(Courier):
    """A courier that is a thread."""

    def __init__(self, commons, links):
        self.commons, self._links = commons, links
        self._wanted, self._thread, self._kept = 0, None, {}

    def start(self, number, work):
        def run():
            is_over = lambda: self._wanted != number  # noqa: E731
            try:
                work.run(WorkContext(self.commons, self._links, number, is_over, kept=self._kept))
            finally:
                self.commons.release_locks()

        self._wanted, work = number, pickle.loads(pickle.dumps(work))
        self._thread = threading.Thread(target=run, name="synkhronos-courier", daemon=True)
        self._thread.start()

    def end(self):
        self._wanted = 0

    def has_stopped(self):
        return self._thread is None or not self._thread.is_alive()
