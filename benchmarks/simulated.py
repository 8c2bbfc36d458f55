"""A network in simulated time, on which the leaders' own code runs: for the model of many machines.

Each leader is a thread with a clock of its own. To send or to receive a message takes half of the time
of a message. The bytes of a leader's messages leave one after the other, and arrive after a delay. A
switch that carries all of them at once is between the leaders, and arithmetic takes no time. The times
depend on the program alone, so other work on this machine does not matter.
"""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run growth_machines.py.")

import threading

from synkhronos.comms.linked import LinkedCommunicator
from synkhronos.machines.leaders import _FIRST, Leaders
from synkhronos.machines.links import as_bytes
from synkhronos.machines.naive import NaiveLinks, NaiveNetwork

import numpy as np


class SimulatedLinks(NaiveLinks):
    """The links of a leader.

    Parameters
    ----------
    network : NaiveNetwork
    rank : int
    costs : Costs
        Of the model; the delay is what is left of a round without a message.
    """

    def __init__(self, network, rank, costs):
        super().__init__(network, rank)
        self._half, self._byte = costs.message / 2, costs.byte
        self._delay = costs.round - costs.message
        self.clock = self._free = 0.0

    def send(self, to, tag, data):
        if tag < _FIRST:  # a notice
            return super().send(to, tag, data)
        view = as_bytes(data)
        self.clock += self._half
        self._free = max(self._free, self.clock) + self._byte * view.size
        with self._network.lock:
            queue = self._network.queues[self.rank, to, tag]
            queue.append((view.tobytes(), self._free + self._delay))
        return 0

    def receive(self, source, tag):
        found = super().receive(source, tag)
        if found is None or tag < _FIRST:
            return found
        sender, (data, arrival) = found
        self.clock = max(self.clock, arrival) + self._half
        return sender, data


def seconds(name, size, nbytes, costs):
    """Return the simulated time of an all-reduce of float32 by an algorithm."""
    from synkhronos.comms.algorithms import parse

    network = NaiveNetwork(size)
    links = [SimulatedLinks(network, rank, costs) for rank in range(size)]
    errors = []

    def reduce(own):
        try:
            leaders = Leaders(own)
            leaders.begin(1)
            leaders.begin_world(may_poll=False)
            comm = LinkedCommunicator(leaders, parse(name))
            [found] = comm.all_reduce([np.ones(nbytes // 4, "float32")], "sum")
            assert (found == size).all()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=reduce, args=(own,), daemon=True) for own in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return max(own.clock for own in links)
