"""The ranks of several machines: the transports of the machines, joined by their leaders.

One rank of each machine is its leader: the rank that has forked the others. A command goes from the
master to the leaders, and from each leader to the ranks of its machine. A reply goes the other way. A
meeting consists of a meeting inside each machine, a meeting between the leaders, and another inside each
machine, in which the leader passes on the items that it received.
"""

from __future__ import annotations

import functools
import pickle
from typing import TYPE_CHECKING, Any, Callable, Sequence

from synkhronos._errors import (
    REMEDY,
    CollectiveAbortedError,
    SynkhronosError,
    WorldBrokenError,
)
from synkhronos.comms.base import SingleRankCommunicator
from synkhronos.comms.linked import LinkedCommunicator
from synkhronos.host.machine import cores
from synkhronos.machines.commands import CommandReceiver, CommandSender, Frames
from synkhronos.machines.communicator import MachineGroup, MachinesCommunicator
from synkhronos.machines.leaders import END
from synkhronos.machines.overlap import OverlappedReduction
from synkhronos.machines.progress_process import ProgressProcess
from synkhronos.machines.relay import Relay
from synkhronos.machines.store import MachinesStore
from synkhronos.stores.handle import RequiredRows
from synkhronos.transports.base import OnDeath, Transport, do_nothing

if TYPE_CHECKING:
    import numpy as np

    from synkhronos.arithmetic.machines import Reading
    from synkhronos.comms.base import Communicator, Group
    from synkhronos.machines.leaders import Leaders
    from synkhronos.machines.store import MachineHandle, ReceivedRows
    from synkhronos.stores.handle import Needs
    from synkhronos.transports.base import ServiceProcess


def _of_local(name: str) -> Any:
    """Return a property that is an attribute of the transport of this machine."""
    return property(
        lambda self: getattr(self.local, name), lambda self, value: setattr(self.local, name, value)
    )


class MachinesTransport(Transport):
    """A rank of several machines.

    Parameters
    ----------
    local : Transport
        The transport of the ranks of this machine, with their numbers among all ranks as labels. Its
        master is the leader.
    leaders : Leaders
        The leaders of the machines.
    machines : list of range
        The ranks of each machine.
    master_rank : int
        The master is the leader of machine 0.
    timeout : float, optional
        The longest time, in seconds, that ranks wait for each other.
    progress_process : ProgressProcess, optional
        The progress process of this machine.
    job : object, optional
        Creates successors: it has `possible_sizes`, and ``successor(former, size, master_rank)``.
    store : MachinesStore, optional
        The store of a former transport of this rank.
    """

    inherits = forks_all = False
    can_replace = True
    store: MachinesStore
    # The exports and replies of the other ranks of this machine, for this command
    _collected: tuple[list[MachineHandle], list[bytes | None]] | None = None
    in_program, is_copy, status, progress = map(
        _of_local, ("in_program", "is_copy", "status", "progress")
    )

    def __init__(
        self,
        local: Transport,
        leaders: Leaders,
        machines: Sequence[range],
        master_rank: int = 0,
        timeout: float | None = None,
        progress_process: ProgressProcess | None = None,
        job: Any = None,
        store: MachinesStore | None = None,
    ) -> None:
        self.local, self.leaders, self._machines = local, leaders, machines
        self.machine = leaders.rank
        self.size = sum(len(ranks) for ranks in machines)
        self.master_rank, self.timeout = master_rank, timeout
        self.ranks_here = local.ranks_here
        self.labels = range(self.size)
        self.is_home = self.machine == 0
        self._progress_process = progress_process = progress_process or ProgressProcess()
        self.has_named_memory = progress_process.named_memory is not None
        if store is None:
            store = MachinesStore(local.store, self.machine, self.rank)
        store.use(self.rank, progress_process.named_memory)
        self.store, self._job = store, job
        self._is_alone = local.size == 1  # on this machine
        self._has_aborted = False  # this rank, in this command
        self._sender = CommandSender(leaders, self.store, machines)
        self._receiver = CommandReceiver(leaders, self.store)
        self._frames = Frames()
        self._while_waiting: Callable[[], None] = do_nothing
        self._ran_program = False  # in the last command; the machine's transport forgets it
        self._here = MachineGroup(local, leaders)
        if self.has_named_memory:
            is_free = lambda: not self.in_program  # noqa: E731
            self.overlap = OverlappedReduction(
                self._here, self.check, is_free, progress_process, local.master_rank
            )
        if self.is_leader:
            leaders.begin_world(
                labels=[", ".join(map(str, ranks)) for ranks in machines],
                may_poll=local.ranks_here <= cores(),
                watch=self._check_here,
                expire=self._check_time,
                leave=self._abort_here,
            )

    @property
    def rank(self) -> int:  # type: ignore[override]  # a local transport has an attribute
        return self._machines[self.machine][self.local.rank]

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader of its machine."""
        return self.local.rank == self.local.master_rank

    @property
    def near(self) -> range:
        return self._machines[self.machine]

    @property
    def is_master(self) -> bool:
        return self.rank == self.master_rank

    def communicator(self, group: Group | None = None) -> Communicator:
        here: Any = self._here
        local = SingleRankCommunicator(here) if self._is_alone else self.local.communicator(here)
        leaders = LinkedCommunicator(self.leaders)
        every: Any = self if group is None else group
        return MachinesCommunicator(every, local, leaders, self.local.master_rank, self._machines)

    def near_communicator(self, group: Group) -> Communicator:
        return self.local.communicator(group)

    def possible_sizes(self) -> range:
        return self._job.possible_sizes()

    def successor(self, size: int, master_rank: int) -> Transport:
        return self._job.successor(self, size, master_rank)

    # Starting and ending

    def start(
        self,
        serve: Callable[[Any], None],
        while_waiting: Callable[[], None] = do_nothing,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start the ranks of this machine."""
        self._while_waiting = while_waiting

        if not self._is_alone:
            serve_here = functools.partial(self._serve_here, serve)
            self.local.start(serve_here, self._check_others, pass_fds)

    def _serve_here(self, serve: Callable[[Any], None], local: Transport) -> None:
        """In a worker of this machine, which has a copy of the leader's transport."""
        self.store.rank = self.rank
        self._progress_process.use_in_fork()
        serve(self)

    def is_master_process(self) -> bool:
        return self.machine == 0 and self.local.is_master_process()

    def is_worker_process(self) -> bool:
        if self.machine > 0 and self.is_leader:
            return self.local.is_master_process()
        return self.local.is_worker_process()

    def kill(self) -> None:
        if self.is_copy:
            return
        if self.machine == 0:
            self.leaders.notify(END, f"the master has ended the ranks; {REMEDY}")
        self._progress_process.close()  # before the named memory is cleared
        self.local.kill()

    def close(self, grace: float) -> None:
        if self.local.is_master_process():  # and not a process that the script has forked
            self._progress_process.close()
        self.local.close(grace)

    def release(self) -> None:
        self.local.release()

    # Between master and workers

    def post(self, payload: bytes, needs: Needs | None = None) -> None:
        self.end_copy()
        self.posted = False
        needed = self._sender.find_needed(needs)
        self._begin(self.leaders.number + 1)
        arrays = self._sender.cut(needed)
        dropped = self._sender.take_dropped()
        self._post_here(payload)
        self.posted = True
        self._sender.send(payload, needed, arrays, dropped)

    def _post_here(self, *content: Any) -> None:
        if not self._is_alone:
            self.local.post(self._frames.pack(*content))

    def receive(self, when_idle: Callable[[], None] = do_nothing) -> bytes:
        self.end_copy()
        self.posted = False
        if self.is_leader:
            return self._receive_of_master()
        frame = self.local.receive()
        self.store.begin()
        self._begin_overlap()
        if not frame:
            return frame
        payload, rows, dropped = self._frames.unpack(frame)
        self.store.drop(dropped)
        self.store.keep_for_command(rows)
        return payload

    def _receive_of_master(self) -> bytes:
        number = self._receiver.receive()
        if self._ran_program:  # it has ended, on all ranks
            self._forget_program()
        self._begin(number)
        content = self._receiver.open()
        self._post_here(*content)
        return content[0]

    def _begin(self, number: int) -> None:
        self.leaders.begin(number)
        self.store.begin()
        self._begin_overlap()
        self._has_aborted = self.in_program = False
        self._on_death = self._collected = None

    def reply(self, payload: bytes) -> None:
        self.end_copy()
        exports = self.store.end()
        if not self.is_leader:
            own = exports, self._has_aborted, payload
            self.local.reply(pickle.dumps(own, pickle.HIGHEST_PROTOCOL))
            self._has_aborted, self.posted = False, True
            return
        if self._collected is None:  # else there was no room for the last reply
            self._collected = self._collect_here()
        more, replies = self._collected
        replies[self.local.rank] = payload
        packed = self._receiver.pack(replies, exports + more)
        self.posted = True
        self._receiver.send(*packed)

    def _collect_here(self) -> tuple[list[MachineHandle], list[bytes | None]]:
        """Return the exports and the replies of the other ranks of this machine."""
        self._ran_program = self.in_program
        self.leaders.ended.end(self.leaders.passed)
        exports: list[MachineHandle] = []
        replies: list[bytes | None] = [None] if self._is_alone else self.local.collect()
        if self.overlap is not None:
            self.overlap.end()
        self.leaders.pass_on_flag()
        for rank, reply in enumerate(replies):
            if reply is not None:
                more, has_aborted, replies[rank] = pickle.loads(reply)
                exports += more
                if has_aborted and not self.leaders.is_aborted:
                    self.leaders.abort()
        return exports, replies

    def collect(self) -> list[bytes | None]:
        self.store.end()
        may_last = self.in_program
        replies: list[bytes | None] = [None] * self.size
        own = self._collect_here()[1]
        for ranks, given in zip(self._machines, [own, *self._sender.collect(may_last)]):
            replies[ranks.start : ranks.stop] = given
        if may_last:
            self._progress_process.finish(self.leaders.wait)
            self.leaders.read_notices()  # requests to stop; others are read while it waits
        self.leaders.pass_on_flag()
        return replies

    # Among all ranks

    def barrier(self) -> None:
        if not self._is_alone:
            self._here.barrier()
        if self.is_leader:
            self.leaders.barrier()
        if not self._is_alone:
            self._here.barrier()

    def exchange(self, item: bytes) -> list[bytes]:
        # The arrays that this rank has put into the store go along.
        own = item, self.store.take_exports()
        if self._is_alone:
            return self._exchange_with_leaders([own])[0]
        here = [pickle.loads(payload) for payload in self._here.exchange(pickle.dumps(own))]
        if self.is_leader:
            items, rows = self._exchange_with_leaders(here)
            self._here.exchange(pickle.dumps((items, rows)))
        else:
            items, rows = pickle.loads(self._here.exchange(b"")[self.local.master_rank])
            self.store.keep(rows)
        return items

    def _exchange_with_leaders(
        self, here: Sequence[tuple[bytes, list[MachineHandle]]]
    ) -> tuple[list[bytes], list[ReceivedRows]]:
        """Return the items of all ranks, and the arrays of other machines that were sent along."""
        leaders, store = self.leaders, self.store
        exports = [handle for _, handles in here for handle in handles]
        own = pickle.dumps(([item for item, _ in here], exports))
        met = [pickle.loads(payload) for payload in leaders.exchange(own)]
        others = [machine for machine in range(len(met)) if machine != leaders.rank]
        arrays = [store.get(handle) for handle in exports]
        sent = [leaders.send_array(machine, array) for array in arrays for machine in others]
        needs, received, receipts = [], [], []
        for machine in others:
            for handle in met[machine][1]:
                needs.append(RequiredRows(handle))
                received.append(store.empty(handle.shape, handle.dtype))
                receipts.append(leaders.receive_array(machine, received[-1]))
        leaders.complete(receipts, sent)
        items = [b""] * self.size
        for ranks, (given, _) in zip(self._machines, met):
            items[ranks.start : ranks.stop] = given
        return items, store.receive(needs, received)

    @property
    def clock(self) -> Callable[[], float]:  # type: ignore[override]  # as above
        return self.leaders.clock

    def compare_clocks(self) -> list[Reading]:
        return self.leaders.compare_clocks() if self.is_leader else []

    def abort(self) -> None:
        self.end_copy()
        self._has_aborted = True
        self._abort_here()
        if self.is_leader:
            self.leaders.abort()

    def _abort_here(self) -> None:
        if not self._is_alone:
            self.local.abort()

    def check(self) -> None:
        self._here.guard(self.local.check)
        if self.is_leader:
            self.leaders.read_notices()
            self._progress_process.check()
            self.leaders.pass_on_flag()
            if self.leaders.is_aborted:
                self._abort_here()
                raise CollectiveAbortedError(
                    f"rank {self.rank} left the program: a rank of another machine failed in it"
                )

    # What a leader checks while it waits

    def _check_here(self, inside: bool) -> None:
        """While it waits for other machines: raise if this machine's ranks cannot continue."""
        self.leaders.pass_on_flag()
        self._progress_process.check()
        try:
            self._here.guard(self.local.check)
        except CollectiveAbortedError:
            if inside:
                raise
        if self.is_master:
            self._while_waiting()

    def _check_others(self) -> None:
        """While it waits for its own machine: raise if other machines cannot continue."""
        self.leaders.read_notices()
        self._progress_process.check()
        self.leaders.pass_on_flag()
        if self.is_master:
            self._while_waiting()

    def _check_time(self, seconds: float) -> None:
        """While it waits for other machines in a command: raise if it has waited too long."""
        limit = self.timeout
        if limit is None or seconds <= limit:
            return
        if self.is_master:
            self.kill()
            raise WorldBrokenError(
                f"a barrier lasted longer than fork(timeout={limit}) seconds, for ranks of other "
                f"machines; every worker was ended; {REMEDY}"
            )
        if self.in_program:
            raise SynkhronosError(
                f"rank {self.rank} waited longer than fork(timeout={limit}) seconds inside a program, "
                f"for ranks of other machines"
            )

    # The progress processes, in programs and during calls

    def begin_program(self, on_death: OnDeath | None = None) -> None:
        self._on_death = on_death
        handle: Any = None
        if on_death is not None:  # by the numbers of all ranks
            handle = lambda dead: on_death({self.near[rank]: dead[rank] for rank in dead})  # noqa: E731
        self.local.begin_program(handle)

    def replace(self, rank: int, prepare: Callable[[bool], None]) -> None:
        self.local.replace(self.near.index(rank), prepare)

    def answer_for(self, rank: int, payload: bytes) -> None:
        own: tuple[list[Any], bool, bytes] = [], False, payload
        self.local.answer_for(self.near.index(rank), pickle.dumps(own, pickle.HIGHEST_PROTOCOL))

    def attend(self, name: str, serve: Callable[[], None]) -> ServiceProcess:
        def serve_here() -> None:
            self._progress_process.use_in_fork()
            serve()

        return self.local.attend(name, serve_here)

    def relay(self) -> None:
        if self.is_leader:
            self._progress_process.start(self.leaders.number, Relay(self._machines))

    def _begin_overlap(self) -> None:
        if self.overlap is not None:
            self.overlap.begin_command()

    def spread(self, flag: np.ndarray) -> None:
        if self.is_leader:
            self.leaders.spread(flag)

    def _forget_program(self) -> None:
        """On machines other than the master's: forget the program, which has ended on all ranks."""
        self._progress_process.finish(self.leaders.wait)
        self.store.named_memory.clear()
        complaint = None if self._on_death is None else self._on_death.complaint()
        if complaint is not None:
            raise WorldBrokenError(complaint)
