"""The ranks of several machines: the transports of the machines, joined by their leaders.

One rank of each machine is its leader: the rank that has forked the others. A command goes from the
master to the leaders, and from each leader to the ranks of its machine. A meeting consists of one inside
each machine, one between the leaders, and again one inside each machine, in which the leader passes on
what it received. A reply goes the other way.
"""

from __future__ import annotations

import pickle

from synkhronos._errors import (
    REMEDY,
    CollectiveAbortedError,
    WorldBrokenError,
)
from synkhronos.comms.alone import AloneCommunicator
from synkhronos.comms.linked import LinkedCommunicator
from synkhronos.host.machine import cores
from synkhronos.machines.cached_arrays import COMMAND, FILE, Lasting
from synkhronos.machines.clocks import compare_clocks
from synkhronos.machines.communicator import MachinesCommunicator
from synkhronos.machines.courier import NoCourier
from synkhronos.machines.delivery import Orders
from synkhronos.machines.leaders import CONTROL, END, REPLY
from synkhronos.machines.meetings import Meetings, place
from synkhronos.machines.overlap import Ahead
from synkhronos.machines.relay.relay import Relay
from synkhronos.machines.stop_request import SpreadFlag
from synkhronos.machines.store import MachinesStore
from synkhronos.machines.waiting import Watch
from synkhronos.stores.required_rows import Need
from synkhronos.transports.base import Transport

NO_COURIER = NoCourier()


def _of_local(name):
    """Return a property that is an attribute of the transport of this machine."""
    return property(
        lambda self: getattr(self.local, name), lambda self, value: setattr(self.local, name, value)
    )


class MachinesTransport(Transport):
    """A rank of several machines.

    Parameters
    ----------
    local : Transport
        The transport of the ranks of this machine. Its master is the leader.
    leaders : Leaders
    machines : list of range
        The ranks of each machine.
    master_rank : int
        The master is the leader of machine 0.
    timeout : float, optional
    courier : Courier, optional
        The courier of this machine.
    job : object, optional
        Creates successors: it has `possible_sizes`, and ``successor(former, size, master_rank)``.
    store : MachinesStore, optional
        The store of a former transport of this rank.
    """

    inherits = forks_all = False
    can_replace = True

    in_program, is_copy, pass_fds = map(_of_local, ("in_program", "is_copy", "pass_fds"))

    def __init__(
        self, local, leaders, machines, master_rank=0, timeout=None, courier=NO_COURIER, job=None,
        store=None,
    ):  # fmt: skip
        self.local, self.leaders, self._machines = local, leaders, machines
        self.machine = leaders.rank
        self.size = sum(len(ranks) for ranks in machines)
        self.master_rank, self.timeout = master_rank, timeout
        self.ranks_here = local.ranks_here
        self.labels = range(self.size)
        local.labels = machines[self.machine]
        self._courier, self.is_home = courier, self.machine == 0
        self.has_commons = courier.commons is not None
        if store is None:
            store = MachinesStore(local.store, self.machine, self.rank)
        store.use(self.rank, courier.commons)
        self.store, self._job = store, job
        self._is_alone = local.size == 1  # on this machine
        self._others = [machine for machine in range(len(machines)) if machine != self.machine]
        self._orders = Orders(len(machines))
        self._has_aborted = False  # this rank, in this command
        self._lasting = Lasting(leaders, self.store, machines)
        self._flag = SpreadFlag(leaders)
        self.on_death = None
        self._ran_program = False  # in the last command; the machine's transport forgets it
        self._meetings = Meetings(local, leaders, self.store, machines)
        if self.has_commons:
            is_free = lambda: not self.in_program  # noqa: E731
            inside = self._meetings.inside
            self.ahead = Ahead(inside, self.check, is_free, courier, local.master_rank)
        if self.is_leader:
            watch = Watch(self, leaders, self._meetings.inside, self._flag, courier)
            leaders.watch, leaders.expire = watch.others, watch.expire
            local.while_waiting = watch.own
            leaders.may_poll = local.ranks_here <= cores()
            leaders.labels = [", ".join(map(str, ranks)) for ranks in machines]
            leaders.leave = self._abort_here
            leaders.begin_world()

    @property
    def rank(self):
        return self._machines[self.machine][self.local.rank]

    @property
    def is_leader(self):
        """Whether this rank is the leader of its machine."""
        return self.local.rank == self.local.master_rank

    @property
    def near(self):
        return self._machines[self.machine]

    @property
    def is_master(self):
        return self.rank == self.master_rank

    def communicator(self):
        inside = self._meetings.inside
        local = AloneCommunicator(inside) if self._is_alone else self.local.communicator()
        local.group = inside
        leaders = LinkedCommunicator(self.leaders)
        return MachinesCommunicator(self, local, leaders, self.local.master_rank, self._machines)

    def possible_sizes(self):
        return self._job.possible_sizes()

    def successor(self, size, master_rank):
        return self._job.successor(self, size, master_rank)

    # Starting and ending

    def start(self, serve):
        """Start the ranks of this machine."""

        def serve_here(local):
            transport = self
            if local is self.local:  # forked: a copy
                self.store.rank = self.rank
                self._courier.use_in_fork()
            else:  # a thread
                transport = MachinesTransport(
                    local, self.leaders, self._machines, self.master_rank, self.timeout, self._courier
                )
            serve(transport)

        if not self._is_alone:
            self.local.start(serve_here)

    def is_master_process(self):
        return self.machine == 0 and self.local.is_master_process()

    def is_worker_process(self):
        if self.machine > 0 and self.is_leader:
            return self.local.is_master_process()
        return self.local.is_worker_process()

    def kill(self):
        if self.is_copy:
            return
        if self.machine == 0:
            self.leaders.notify(END, f"the master has ended the ranks; {REMEDY}")
        self._courier.close()  # before the commons are cleared
        self.local.kill()

    def close(self, grace):
        if self.local.is_master_process():  # and not a process that the script has forked
            self._courier.close()
        self.local.close(grace)

    def release(self):
        self.local.release()

    # Between master and workers

    def post(self, payload, needs=None):
        self.end_copy()
        self.posted = False
        wanted = [self._lasting.still_needed(machine, needs) for machine in self._others]
        self._begin(self.leaders.number + 1)
        arrays = [[self.store.cut(need) for need in one] for one in wanted]
        dropped = self._lasting.take_dropped()
        self._post_here(payload, (), ())
        self.posted = True
        for machine, needed, sent in zip(self._others, wanted, arrays):
            message = self._orders.message(machine, payload, needed, dropped)
            self.leaders.send(machine, CONTROL, message, sent)
            self._lasting.mark_sent(machine, needed)

    def _post_here(self, payload, parts, dropped):
        if not self._is_alone:
            self.local.post(self._orders.frame(payload, parts, dropped))

    def receive(self):
        self.end_copy()
        self.posted = False
        if self.is_leader:
            return self._receive_of_master()
        frame = self.local.receive()
        self.store.begin()
        self._begin_ahead()
        if not frame:
            return frame
        parts, dropped, payload = self._orders.open(frame)
        self.store.drop(dropped)
        self.store.keep_for_command(parts)
        return payload

    def _receive_of_master(self):
        files, former = [], self._orders.received
        while True:
            number, message, arrays = self.leaders.receive(0, CONTROL, self.store.empty, True, former)
            if message[0] == COMMAND:
                break
            if message[0] != FILE:
                # The master has broken this world, and the notice has not been read yet.
                self.leaders.postpone(number, message)
                raise WorldBrokenError("the master has ended the ranks")
            files += self._lasting.find_file(*message[1:])
        _, payload, wanted, dropped = message
        if self._ran_program:  # it has ended, on all ranks
            self._end_program()
        self._begin(number)
        self._meetings.drop(dropped)
        if message is not former[0] or files:
            self._orders.received = message, arrays
            self._orders.parts = files + self._meetings.keep(wanted, arrays)
        self.store.keep_for_command(self._orders.parts)
        self._post_here(payload, self._orders.parts, dropped)
        return payload

    def _begin(self, number):
        self.leaders.begin(number)
        self._meetings.begin()
        self._begin_ahead()
        self._has_aborted = self.in_program = False
        self._flag.begin()

    def reply(self, payload):
        self.end_copy()
        exports = self.store.end()
        if not self.is_leader:
            own = exports, self._has_aborted, payload
            self.local.reply(pickle.dumps(own, pickle.HIGHEST_PROTOCOL))
            self._has_aborted, self.posted = False, True
            return
        more, replies = self._collect_here()
        replies[self.local.rank] = payload
        exports += more
        arrays = [self.store.get(handle) for handle in exports]
        self.posted = True
        self.leaders.send(0, REPLY, (replies, exports), arrays)

    def _collect_here(self):
        """Return the exports and the replies of the other ranks of this machine."""
        self._ran_program = self.in_program
        self.leaders.absent.end(self.leaders.passed)
        exports, replies = [], [None] if self._is_alone else self.local.collect()
        self._end_ahead()
        self._flag.pass_on()
        for rank, reply in enumerate(replies):
            if reply is not None:
                more, has_aborted, replies[rank] = pickle.loads(reply)
                exports += more
                if has_aborted and not self.leaders.is_aborted:
                    self.leaders.abort()
        return exports, replies

    def collect(self):
        self.store.end()
        may_last = self.in_program
        replies = [None] * self.size
        place(replies, self._machines[self.machine], self._collect_here()[1])
        for machine in self._others:
            number = -1
            while number < self.leaders.number:  # others belong to a world that broke
                number, (given, exports), arrays = self.leaders.receive(
                    machine, REPLY, self.store.empty, may_last
                )
            self._meetings.keep([Need(handle) for handle in exports], arrays)
            place(replies, self._machines[machine], given)
        if may_last:
            self._end_relay()
            self.leaders.read_notices()  # requests to stop; others are read while it waits
        self._flag.pass_on()
        return replies

    # Among all ranks

    def barrier(self):
        self._meetings.barrier()

    def exchange(self, item):
        return self._meetings.exchange(item)

    @property
    def clock(self):
        return self.leaders.clock

    def compare_clocks(self):
        return compare_clocks(self.leaders) if self.is_leader else []

    def abort(self):
        self.end_copy()
        self._has_aborted = True
        self._abort_here()
        if self.is_leader:
            self.leaders.abort()

    def _abort_here(self):
        if not self._is_alone:
            self.local.abort()

    def check(self):
        self._meetings.inside.guard(self.local.check)
        if self.is_leader:
            self.leaders.read_notices()
            self._courier.check()
            self._flag.pass_on()
            if self.leaders.is_aborted:
                self._abort_here()
                raise CollectiveAbortedError(
                    f"rank {self.rank} left the program: a rank of another machine failed in it"
                )

    # The couriers, in programs and during calls

    @property
    def on_death(self):
        return self._on_death

    @on_death.setter
    def on_death(self, on_death):
        """Let it be called with the ranks' numbers in the world."""
        self._on_death, self.local.on_death = on_death, None
        if on_death is not None:
            self.local.on_death = lambda dead: on_death(
                {self.near[rank]: cause for rank, cause in dead.items()}
            )

    def replace(self, rank, prepare):
        self.local.replace(self.near.index(rank), prepare)

    def answer_for(self, rank, payload):
        own = [], False, payload
        self.local.answer_for(self.near.index(rank), pickle.dumps(own, pickle.HIGHEST_PROTOCOL))

    def attend(self, name, serve):
        def serve_here():
            self._courier.use_in_fork()
            serve()

        return self.local.attend(name, serve_here)

    def relay(self):
        if self.is_leader:
            self._courier.start(self.leaders.number, Relay(self._machines))

    def _end_relay(self):
        self._courier.end()
        self.leaders.wait(self._courier.has_stopped)

    def _begin_ahead(self):
        if self.ahead is not None:
            self.ahead.begin_command()

    def _end_ahead(self):
        if self.ahead is not None:
            self.ahead.end()

    def spread(self, flag):
        if self.is_leader:
            self._flag.begin(flag)

    def _end_program(self):
        """On machines other than the master's: forget the program, which has ended on all ranks."""
        self._end_relay()
        self.store.commons.clear()
        replacing, self.on_death = self.on_death, None
        complaint = None if replacing is None else replacing.complaint()
        if complaint is not None:
            raise WorldBrokenError(complaint)
