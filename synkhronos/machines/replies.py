"""How the replies of the ranks of other machines get to the master.

They are gathered along the tree by which the command came: a leader waits for the replies of its own
ranks, then for those of its children, and sends all of them to its parent. Arrays follow, the small ones
as part of the replies; the larger ones are sent directly to the master.
"""

from __future__ import annotations

import pickle
from typing import NamedTuple, Sequence

import numpy as np

from synkhronos.arithmetic import trees
from synkhronos.machines.bundles import KEPT
from synkhronos.machines.inbox import ControlMessage
from synkhronos.machines.leaders import OF_REPLIES, REPLY, SMALL, Leaders
from synkhronos.machines.links import as_bytes
from synkhronos.machines.store import MachineHandle, MachinesStore
from synkhronos.stores.required_rows import RequiredRows

_MASTER = 0


class OfMachine(NamedTuple):
    """The replies of the ranks of a machine, as its leader sends them.

    Attributes
    ----------
    replies : list of bytes
        The reply of each rank.
    arrays : bytes
        The pickled `Exports`; empty if there are none.
    """

    replies: Sequence[bytes | None]
    arrays: bytes


class Exports(NamedTuple):
    """The arrays that the ranks of a machine have put into its store.

    Attributes
    ----------
    handles : list of MachineHandle
        The handle of each array.
    contents : list of bytes or None
        The contents of each array, or None if the array is large.
    """

    handles: Sequence[MachineHandle]
    contents: Sequence[bytes | None]


class Replies:
    """The replies to the commands of a world, for the leader of a machine.

    Parameters
    ----------
    leaders : Leaders
        The leaders of the machines.
    store : MachinesStore
        The store of the leader.
    """

    def __init__(self, leaders: Leaders, store: MachinesStore) -> None:
        self._leaders, self._store = leaders, store
        self._children = trees.children(leaders.rank, leaders.size)
        self._number = -1
        self._arrived: dict[int, bytes] = {}  # from children, for this command
        # By child: the last message, and its contents
        self._last: dict[int, tuple[bytes, list[OfMachine]]] = {}

    def gather(self, idle: bool) -> list[bytes]:
        """Wait for the message of each child, by number; `idle` is whether there is no time limit.

        If it is called again after an error, it waits for those only that have not arrived.
        """
        if self._number != self._leaders.number:
            self._number, self._arrived = self._leaders.number, {}
        for child in reversed(self._children):  # first those that have fewer machines below them
            while child not in self._arrived:
                letter = self._leaders.receive(child, REPLY, idle)
                if letter.number == self._number:  # others belong to a world that broke
                    self._arrived[child] = letter.body
        return [self._arrived[child] for child in sorted(self._children)]

    # Of another machine than the master's

    def pack(
        self, replies: Sequence[bytes | None], handles: Sequence[MachineHandle]
    ) -> tuple[OfMachine, list[np.ndarray]]:
        """Return the replies of this machine as they are sent, and the arrays to send directly."""
        if not handles:
            return OfMachine(replies, b""), []
        arrays = [self._store.get(handle) for handle in handles]
        contents = [array.tobytes() if array.nbytes <= SMALL else None for array in arrays]
        exports = pickle.dumps(tuple(Exports(handles, contents)), pickle.HIGHEST_PROTOCOL)
        return OfMachine(replies, exports), [array for array in arrays if array.nbytes > SMALL]

    def send(self, own: OfMachine, below: Sequence[bytes], arrays: Sequence[np.ndarray]) -> None:
        """Send the replies of this machine and of those below it to the parent."""
        every = [tuple(own)]
        for message in below:
            every += pickle.loads(message)
        leaders = self._leaders
        body = pickle.dumps(every, pickle.HIGHEST_PROTOCOL)
        letter = ControlMessage(leaders.number, leaders.first_number, body)
        leaders.send(trees.parent(leaders.rank), REPLY, letter)
        for array in arrays:
            leaders.send_array(_MASTER, array, OF_REPLIES)

    # Of the master

    def collect(self, idle: bool) -> list[Sequence[bytes | None]]:
        """Wait for the replies of all other machines, and put their arrays into the store.

        Returns
        -------
        list
            By machine, the reply of each rank; the master's machine is left out.
        """
        messages = self.gather(idle)
        found = [one for each in zip(sorted(self._children), messages) for one in self._unpack(*each)]
        if any([arrays for _, arrays in found]):
            self._receive_arrays([arrays for _, arrays in found])
        return [replies for replies, _ in found]

    def _unpack(self, child: int, message: bytes) -> list[OfMachine]:
        last, found = self._last.get(child, (b"", []))
        if message != last:  # the same call is often repeated, with the same replies
            found = pickle.loads(message)
            self._last[child] = (message, found) if len(message) <= KEPT else (b"", [])
        return found

    def _receive_arrays(self, by_machine: Sequence[bytes]) -> None:
        received, announced = [], []
        for machine, arrays in enumerate(by_machine, 1):
            for handle, content in zip(*pickle.loads(arrays)) if arrays else ():
                array = self._store.empty(handle.shape, handle.dtype)
                received.append((RequiredRows(handle), array))
                if content is None:
                    announced.append((machine, array))
                else:
                    as_bytes(array)[...] = np.frombuffer(content, np.uint8)
        self._leaders.receive_arrays(announced, OF_REPLIES)
        self._store.receive(*zip(*received))
