"""Meetings of the ranks of several machines: inside each machine, between leaders, inside each again."""

from __future__ import annotations

import pickle

from synkhronos._errors import CollectiveAbortedError
from synkhronos.machines.store import Part, name_of
from synkhronos.stores.required_rows import Need


class Inside:
    """The ranks of one machine, as a `Group`. The leader reports their failures to the other leaders."""

    def __init__(self, local, leaders):
        self._local, self._all_leaders = local, leaders
        self.size = local.size

    @property
    def rank(self):
        return self._local.rank

    @property
    def leaders(self):
        """The `Leaders` if this rank is a leader, else None. A forked rank has the leader's objects."""
        return self._all_leaders if self._local.rank == self._local.master_rank else None

    def barrier(self):
        self.guard(self._local.barrier)

    def exchange(self, item):
        return self.guard(self._local.exchange, item)

    def guard(self, function, *args):
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
    machines : list of range
        The ranks of each machine.

    Attributes
    ----------
    inside : Inside
    """

    def __init__(self, local, leaders, store, machines):
        self.inside = Inside(local, leaders)
        self._leader, self._store = local.master_rank, store
        self._machines = machines
        self._kept = []  # arrays of other machines
        self._lasting = {}  # kept arrays, by the names of their handles

    def barrier(self):
        if self.inside.size > 1:
            self.inside.barrier()
        if self.inside.leaders is not None:
            self.inside.leaders.barrier()
        if self.inside.size > 1:
            self.inside.barrier()

    def exchange(self, item):
        """Return the items of all ranks. The arrays that this rank has put into the store go along."""
        own = item, self._store.take_exports()
        here = [own]
        if self.inside.size > 1:
            here = [pickle.loads(one) for one in self.inside.exchange(pickle.dumps(own))]
        items, parts = self._of_leaders(here) if self.inside.leaders is not None else (None, None)
        if self.inside.size > 1:
            shared = self.inside.exchange(b"" if items is None else pickle.dumps((items, parts)))
            if items is None:
                items, parts = pickle.loads(shared[self._leader])
                self._store.keep(parts)
        return items

    def _of_leaders(self, here):
        """Return the items of all ranks, and the arrays of other machines that were sent along."""
        leaders = self.inside.leaders
        exports = [handle for _, handles in here for handle in handles]
        own = pickle.dumps(([item for item, _ in here], exports))
        met = [pickle.loads(one) for one in leaders.exchange(own)]
        others = [machine for machine in range(len(met)) if machine != leaders.rank]
        arrays = [self._store.get(handle) for handle in exports]
        sent = [leaders.send_array(machine, array) for array in arrays for machine in others]
        needs, received, receipts = [], [], []
        for machine in others:
            for handle in met[machine][1]:
                needs.append(Need(handle))
                received.append(self._store.empty(handle.shape, handle.dtype))
                receipts.append(leaders.receive_array(machine, received[-1]))
        leaders.complete(receipts, sent)
        items = [None] * sum(map(len, self._machines))
        for ranks, (given, _) in zip(self._machines, met):
            place(items, ranks, given)
        return items, self.keep(needs, received)

    def keep(self, needs, arrays):
        """Put arrays of other machines into this machine's store; return the list of `Part`."""
        for need, array in zip(needs, arrays):
            if need.lasts:
                self._lasting[name_of(need.handle)] = array
            else:
                self._kept.append(array)
        parts = [Part(need, self._store.local.put(array)) for need, array in zip(needs, arrays)]
        self._store.keep(parts)
        return parts

    def drop(self, keys):
        """Forget kept arrays."""
        self._store.drop(keys)
        for key in keys:
            self._lasting.pop(key, None)

    def begin(self):
        """Start a command: the arrays of other machines are not needed any more."""
        self._store.begin()
        self._kept.clear()


def place(items, ranks, given):
    """Set the items of consecutive ranks."""
    items[ranks.start : ranks.stop] = given
