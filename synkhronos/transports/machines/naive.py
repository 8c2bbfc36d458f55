"""Messages between leaders as an executable specification: queues in one process."""

from __future__ import annotations

import collections
import threading

import numpy as np

from synkhronos.transports.machines.links import Links, Receipt, as_bytes


class NaiveNetwork:
    """The queues of the messages among `size` leaders, which are threads."""

    def __init__(self, size):
        self.size = size
        self.lock = threading.Lock()
        self.queues = collections.defaultdict(collections.deque)

    def links(self):
        """Return the `Links` of each leader."""
        return [NaiveLinks(self, rank) for rank in range(self.size)]


class NaiveLinks(Links):
    """The links of one leader. A message is copied when it is sent."""

    def __init__(self, network, rank):
        self._network = network
        self.rank, self.size = rank, network.size

    def send(self, to, tag, data):
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
