"""Meetings of the ranks of several machines: inside each machine, between leaders, inside each again."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Callable, Sequence

from synkhronos._errors import CollectiveAbortedError
from synkhronos.stores.required_rows import RequiredRows

if TYPE_CHECKING:
    from synkhronos._typing import T
    from synkhronos.machines.leaders import Leaders
    from synkhronos.machines.store import MachineHandle, MachinesStore, ReceivedRows
    from synkhronos.transports.base import Transport


class MachineGroup:
    """The ranks of one machine, as a `Group`. The leader reports their failures to the other leaders."""

    def __init__(self, local: Transport, leaders: Leaders) -> None:
        self._local, self._all_leaders = local, leaders
        self.size = local.size

    @property
    def rank(self) -> int:
        return self._local.rank

    @property
    def leaders(self) -> Leaders | None:
        """The `Leaders` if this rank is a leader, else None. A forked rank has the leader's objects."""
        return self._all_leaders if self._local.rank == self._local.master_rank else None

    def barrier(self) -> None:
        self.guard(self._local.barrier)

    def exchange(self, item: bytes) -> list[bytes]:
        return self.guard(self._local.exchange, item)

    def guard(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that raises if another rank of this machine has failed."""
        try:
            return function(*args)
        except CollectiveAbortedError:
            if self.leaders is not None and not self.leaders.is_aborted:
                self.leaders.abort()
            raise


class Meetings:
    """The meetings of one rank.

    Parameters
    ----------
    local : Transport
        The transport of this machine's ranks; its master is the leader.
    leaders : Leaders
        Used only by leaders.
    store : MachinesStore
        The store of this rank.
    machines : list of range
        The ranks of each machine.

    Attributes
    ----------
    group : MachineGroup
        The ranks of this machine.
    """

    def __init__(
        self, local: Transport, leaders: Leaders, store: MachinesStore, machines: Sequence[range]
    ) -> None:
        self.group = MachineGroup(local, leaders)
        self._leader, self._store = local.master_rank, store
        self._machines = machines

    def barrier(self) -> None:
        if self.group.size > 1:
            self.group.barrier()
        if self.group.leaders is not None:
            self.group.leaders.barrier()
        if self.group.size > 1:
            self.group.barrier()

    def exchange(self, item: bytes) -> list[bytes]:
        """Return the items of all ranks. The arrays that this rank has put into the store go along."""
        own = item, self._store.take_exports()
        state = [own]
        if self.group.size > 1:
            state = [pickle.loads(one) for one in self.group.exchange(pickle.dumps(own))]
        items: Any = None
        rows: Any = None
        leaders = self.group.leaders
        if leaders is not None:
            items, rows = self._of_leaders(leaders, state)
        if self.group.size > 1:
            shared = self.group.exchange(b"" if items is None else pickle.dumps((items, rows)))
            if items is None:
                items, rows = pickle.loads(shared[self._leader])
                self._store.keep(rows)
        return items

    def _of_leaders(
        self, leaders: Leaders, state: Sequence[tuple[bytes, list[MachineHandle]]]
    ) -> tuple[list[Any], list[ReceivedRows]]:
        """Return the items of all ranks, and the arrays of other machines that were sent along."""
        exports = [handle for _, handles in state for handle in handles]
        own = pickle.dumps(([item for item, _ in state], exports))
        met = [pickle.loads(one) for one in leaders.exchange(own)]
        others = [machine for machine in range(len(met)) if machine != leaders.rank]
        arrays = [self._store.get(handle) for handle in exports]
        sent = [leaders.send_array(machine, array) for array in arrays for machine in others]
        needs, received, receipts = [], [], []
        for machine in others:
            for handle in met[machine][1]:
                needs.append(RequiredRows(handle))
                received.append(self._store.empty(handle.shape, handle.dtype))
                receipts.append(leaders.receive_array(machine, received[-1]))
        leaders.complete(receipts, sent)
        items = [None] * sum(map(len, self._machines))
        for ranks, (given, _) in zip(self._machines, met):
            set_items(items, ranks, given)
        return items, self._store.receive(needs, received)


def set_items(items: list[Any], ranks: range, given: Sequence[Any]) -> None:
    """Set the items of consecutive ranks."""
    items[ranks.start : ranks.stop] = given
