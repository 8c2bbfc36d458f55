"""Several machines in one process: their leaders are threads, joined by a naive network."""

import threading

from synkhronos._errors import WorldBrokenError
from synkhronos.arithmetic.machines import ranks_of_machines
from synkhronos.transports.machines.leaders import Leaders
from synkhronos.transports.machines.naive import NaiveCourier, NaiveNetwork
from synkhronos.transports.machines.transport import MachinesTransport
from synkhronos.transports.naive import NaiveTransport


class ThreadedMachines(MachinesTransport):
    """The master's transport of machines with `sizes` ranks; all ranks are threads.

    Parameters
    ----------
    sizes : list of int
    master_rank : int
    timeout : float, optional
    have_couriers : bool
        Whether each machine has a courier, a thread, too.
    """

    def __init__(self, sizes, master_rank=0, timeout=None, have_couriers=True):
        self._ranges = ranks_of_machines(sizes, master_rank)
        first, *self._links = NaiveNetwork(len(sizes)).links()
        self._between_couriers = NaiveNetwork(len(sizes)).links() if have_couriers else None
        local = NaiveTransport(sizes[0], self._ranges[0].index(master_rank), timeout)
        courier = self._courier_for(local, first)
        super().__init__(local, Leaders(first), self._ranges, master_rank, timeout, courier)
        self._threads = []

    def _courier_for(self, local, links):
        if self._between_couriers is None:
            return None
        return NaiveCourier(local.store.commons, self._between_couriers[links.rank])

    def start(self, serve):
        for links in self._links:
            thread = threading.Thread(target=self._serve_machine, args=(links, serve), daemon=True)
            self._threads.append(thread)
            thread.start()
        super().start(serve)

    def _serve_machine(self, links, serve):
        local = NaiveTransport(len(self._ranges[links.rank]), 0, self.timeout)
        transport = MachinesTransport(
            local, Leaders(links), self._ranges, self.master_rank, self.timeout,
            self._courier_for(local, links),
        )  # fmt: skip
        transport.start(serve)
        try:
            serve(transport)
        except (WorldBrokenError, SystemExit):
            pass
        finally:
            transport.close(1)

    def close(self, grace):
        super().close(grace)
        for thread in self._threads:
            thread.join(grace)
            assert not thread.is_alive()
