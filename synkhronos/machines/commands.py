"""How a command, with the arrays that it needs, gets from the master to the ranks of other machines.

The master sends a message to the leader of each other machine, and the rows of arrays that the ranks
there need. The leader puts these into the store of its machine, and sends the other ranks of its machine
a *frame*: the command, and where the rows are. The same call is often repeated. Then each rank reuses
the objects that it sent or received the last time: nothing is pickled again, and the arrays are received
into the same memory, of which the command may still have views.

Other machines keep some arrays between commands. A constant array is sent once to each machine that
needs it. A machine that has a file with the same name and contents, according to the digests, maps it;
otherwise its rows are sent like the rows of other arrays.
"""

from __future__ import annotations

import pickle
from typing import Any, Hashable, NamedTuple, Sequence, Tuple

import numpy as np

from synkhronos._errors import WorldBrokenError
from synkhronos.machines.leaders import CONTROL, REPLY, Leaders
from synkhronos.machines.store import MachinesStore, ReceivedRows, lasts, name_of
from synkhronos.stores.files import FileHandle, digest, find_same_file
from synkhronos.stores.required_rows import Need, Needs, combine

COMMAND, FILE = "command", "file"  # messages between commands

#: The keys of constant arrays that are no longer needed
_Keys = Sequence[Tuple[int, int]]
#: The command, the rows of arrays that came along, and the keys of dropped arrays
_Content = Tuple[bytes, Sequence[ReceivedRows], _Keys]


class Message(NamedTuple):
    """A message of the master to a leader.

    Attributes
    ----------
    kind : str
        `COMMAND`
    payload : bytes
        The command.
    needed : list of Need
        The rows of arrays that are sent along.
    dropped : list
        The keys of constant arrays that are no longer needed.
    """

    kind: str
    payload: bytes
    needed: Sequence[Need]
    dropped: Sequence[tuple[int, int]]


class CommandSender:
    """In the master: sends commands to the other machines, and knows which arrays these keep.

    Parameters
    ----------
    leaders : Leaders
        The leaders of the machines.
    store : MachinesStore
        The store of this rank.
    machines : list of range
        The ranks of each machine.
    """

    def __init__(self, leaders: Leaders, store: MachinesStore, machines: Sequence[range]) -> None:
        self._leaders, self._store, self._machines = leaders, store, machines
        self._others = range(1, len(machines))
        self._size = sum(map(len, machines))
        # For each machine:
        self._kept: list[dict[Hashable, bool]] = [
            {} for _ in machines
        ]  # by name, whether it keeps the array
        self._found: list[tuple[Needs | None, list[Need]]] = [(None, [])] * len(
            machines
        )  # what it needed for the last command
        self._sent = [Message(COMMAND, b"", [], [])] * len(machines)
        self._digests: dict[FileHandle, bytes] = {}

    def find_needed(self, needs: Needs | None) -> list[list[Need]]:
        """Return the rows that each other machine needs for a command and does not have.

        A repeated command gets the same lists, unless a machine keeps some of the arrays.
        """
        return [self._find_needed(machine, needs) for machine in self._others]

    def _find_needed(self, machine: int, needs: Needs | None) -> list[Need]:
        if needs is None:
            return []
        last, found = self._found[machine]
        if needs != last:
            found = combine(needs(self._machines[machine], self._size))
            self._found[machine] = needs, found
        if not any([lasts(need.handle) for need in found]):
            return found
        return [one for one in [self._missing(machine, need) for need in found] if one is not None]

    def _missing(self, machine: int, need: Need) -> Need | None:
        """Return a need in the form in which it is sent, or None if the machine has the array."""
        handle, kept = need.handle, self._kept[machine]
        if not lasts(handle):
            return need
        name = name_of(handle)
        if isinstance(handle, FileHandle):
            if name not in kept:
                kept[name] = self._ask_for_file(machine, handle)
            return None if kept[name] else need
        return None if name in kept else Need(handle, lasts=True)

    def _ask_for_file(self, machine: int, handle: FileHandle) -> bool:
        if handle not in self._digests:
            self._digests[handle] = digest(self._store.get(handle))
        self._leaders.send(machine, CONTROL, (FILE, handle, self._digests[handle]))
        answer = None
        while answer is None or answer[0] != FILE:  # otherwise it replies to a command of a former world
            _, answer, _ = self._leaders.receive(machine, REPLY, np.empty)
        return answer[1]

    def cut(self, needed: list[list[Need]]) -> list[list[np.ndarray]]:
        """Return the rows of arrays to send to each other machine."""
        return [[self._store.cut(need) for need in one] for one in needed]

    def send(
        self, payload: bytes, needed: list[list[Need]], arrays: list[list[np.ndarray]], dropped: _Keys
    ) -> None:
        """Send a command to the other leaders."""
        for machine, needs, rows in zip(self._others, needed, arrays):
            message = self.message(machine, payload, needs, dropped)
            self._leaders.send(machine, CONTROL, message, rows)
            self._kept[machine].update((name_of(need.handle), True) for need in needs if need.lasts)

    def message(self, machine: int, payload: bytes, needed: list[Need], dropped: _Keys) -> Message:
        """Return the message to a leader: the same object as the last time if it is equal."""
        last = self._sent[machine]
        if payload is not last.payload or needed is not last.needed or dropped != last.dropped:
            self._sent[machine] = Message(COMMAND, payload, needed, dropped)
        return self._sent[machine]

    def take_dropped(self) -> list[tuple[int, int]]:
        """Return the keys of constant arrays that machines no longer need to keep."""
        keys, self._store.dropped[:] = list(self._store.dropped), []
        for kept in self._kept:
            for key in keys:
                kept.pop(key, None)
        return keys


class CommandReceiver:
    """In the leader of another machine: receives commands of the master.

    Parameters
    ----------
    leaders : Leaders
        The leaders of the machines.
    store : MachinesStore
        The store of this rank.
    """

    def __init__(self, leaders: Leaders, store: MachinesStore) -> None:
        self._leaders, self._store = leaders, store
        self._last: tuple[Any, list[np.ndarray]] = None, []  # a message, and the arrays that came along
        self._received: tuple[Any, list[np.ndarray]] = self._last
        self._files: list[ReceivedRows] = []  # in files of this machine
        self._rows: Sequence[ReceivedRows] = ()

    def receive(self) -> int:
        """Wait for a command; return its number."""
        self._files = []
        while True:
            number, message, arrays = self._leaders.receive(
                0, CONTROL, self._store.empty, True, self._last
            )
            if message[0] == COMMAND:
                self._received = message, arrays
                return number
            if message[0] != FILE:
                # The master has broken this world, and the notice has not been read yet.
                self._leaders.postpone(number, message)
                raise WorldBrokenError("the master has ended the ranks")
            self._find_file(*message[1:])

    def _find_file(self, handle: FileHandle, expected: bytes) -> None:
        """Answer whether this machine has a file of the master."""
        own = find_same_file(handle, expected)
        self._leaders.send(0, REPLY, (FILE, own is not None))
        if own is not None:
            self._files.append(ReceivedRows(Need(handle, lasts=True), own))

    def open(self) -> _Content:
        """Put the arrays of the command into the store; return the arguments for `Frames.pack`."""
        message, arrays = self._received
        self._store.drop(message.dropped)
        if message is not self._last[0] or self._files:
            self._last = self._received
            self._rows = self._files + self._store.receive(message.needed, arrays)
        self._store.keep_for_command(self._rows)
        return message.payload, self._rows, message.dropped


class Frames:
    """The frames that a leader sends to the other ranks of its machine, packed and unpacked."""

    def __init__(self) -> None:
        self._packed: tuple[_Content, bytes] = (b"", (), ()), b""
        self._unpacked: tuple[bytes, _Content] = b"", (b"", (), ())

    def pack(self, payload: bytes, rows: Sequence[ReceivedRows] = (), dropped: _Keys = ()) -> bytes:
        """Return a frame; empty bytes mean the end of the world."""
        (last_payload, last_rows, last_dropped), frame = self._packed
        if payload is not last_payload or rows is not last_rows or dropped != last_dropped:
            content = payload, rows, dropped
            frame = pickle.dumps(content, pickle.HIGHEST_PROTOCOL) if payload else b""
            self._packed = content, frame
        return frame

    def unpack(self, frame: bytes) -> _Content:
        """Return the arguments that were given to `pack`."""
        if frame != self._unpacked[0]:
            self._unpacked = frame, pickle.loads(frame)
        return self._unpacked[1]
