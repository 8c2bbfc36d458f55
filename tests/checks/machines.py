"""Several machines in one process: their leaders are threads, joined by a naive network."""

import threading
import time

from synkhronos._errors import WorldBrokenError
from synkhronos.arithmetic.machines import fewer_on_machines, nearest_master, ranks_of_machines
from synkhronos.machines.leaders import Leaders
from specifications.links import NaiveProgressProcess, NaiveNetwork
from synkhronos.machines.transport import MachinesTransport
from specifications.transport import NaiveTransport
from synkhronos.world.threads import ThreadLimits
from synkhronos.world.world import World, enter_world


def start_world(transport, engine):
    """Start a world of ranks with a transport and an engine, and return it."""
    world = World(transport, engine, ThreadLimits())
    enter_world(world)
    if not world.workers_inherit:
        world.start()
    return world


class ThreadedMachine(MachinesTransport):
    """The leader's transport of one machine, whose ranks are threads with a transport each."""

    def _serve_here(self, serve, local):
        serve(
            MachinesTransport(
                local,
                self.leaders,
                self._machines,
                self.master_rank,
                self.timeout,
                self._progress_process,
            )
        )


class ThreadedMachines(ThreadedMachine):
    """The master's transport of machines with `sizes` ranks; all ranks are threads.

    So are progress processes. Each machine may have a clock of its own, and the transport be the
    successor of a former one.
    """

    def __init__(
        self, sizes, master_rank=0, timeout=None, have_progress_processes=True, former=None, clocks=None,
    ):  # fmt: skip
        self._ranges = ranks_of_machines(sizes, master_rank)
        self._most = sizes if former is None else former._most
        first, *self._links = NaiveNetwork(len(sizes)).links()
        self._between_progress_processes = (
            NaiveNetwork(len(sizes)).links() if have_progress_processes else None
        )
        own = sizes[0], self._ranges[0].index(master_rank)
        local = NaiveTransport(*own, timeout, former and former.local.store, self._ranges[0])
        progress_process = self._progress_process_for(local, first)
        store = None if former is None else former.store
        self._threads = []
        self._clocks = clocks or [time.perf_counter] * len(sizes)
        leaders = Leaders(first, self._clocks[0])
        super().__init__(
            local, leaders, self._ranges, master_rank, timeout, progress_process, store=store
        )

    def possible_sizes(self):
        return range(len(self._most), sum(self._most) + 1)

    def successor(self, size, master_rank):
        sizes = [len(one) for one in fewer_on_machines([[0] * one for one in self._most], size)]
        return ThreadedMachines(
            sizes, nearest_master(sizes, master_rank), self.timeout,
            self._between_progress_processes is not None, self,
        )  # fmt: skip

    def _progress_process_for(self, local, links):
        if self._between_progress_processes is None:
            return None
        return NaiveProgressProcess(
            local.store.named_memory, self._between_progress_processes[links.rank]
        )

    def start(self, serve, *options):
        for links in self._links:
            thread = threading.Thread(target=self._serve_machine, args=(links, serve), daemon=True)
            self._threads.append(thread)
            thread.start()
        super().start(serve, *options)

    def _serve_machine(self, links, serve):
        own = self._ranges[links.rank]
        local = NaiveTransport(len(own), 0, self.timeout, labels=own)
        leaders = Leaders(links, self._clocks[links.rank])
        transport = ThreadedMachine(
            local, leaders, self._ranges, self.master_rank, self.timeout,
            self._progress_process_for(local, links),
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
