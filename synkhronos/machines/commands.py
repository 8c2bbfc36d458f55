"""How commands, with the arrays that they need, get to the ranks of other machines, and replies back.

The master sends a message to the leader of each other machine. Small arrays are part of the message;
larger ones follow it, and are received into the memory where they stay.

A leader puts the arrays into the store of its machine, and sends the other ranks of its machine a
*frame*: the command, and where the rows are. The same call is often repeated. Then the messages are
equal, and each rank reuses the objects that it received the last time: nothing is unpickled again, and
the arrays are received into the same memory, of which the command may still have views.

Other machines keep some arrays between commands. A constant array is sent once to each machine that
needs it. A machine that has a file with the same name and contents, according to the digests, maps it;
otherwise its rows are sent like the rows of other arrays.

A leader sends the replies of its ranks to the master. Arrays that these have put into the store follow,
the small ones as part of the replies.
"""

from __future__ import annotations

import pickle
from typing import Hashable, NamedTuple, Sequence, Tuple

import numpy as np

from synkhronos._errors import WorldBrokenError
from synkhronos.arithmetic.comparison import digest
from synkhronos.machines.leaders import (
    CONTROL,
    OF_COMMAND,
    OF_REPLIES,
    REPLY,
    SMALL,
    ControlMessage,
    Leaders,
    as_bytes,
)
from synkhronos.machines.store import MachineHandle, MachinesStore, ReceivedRows, lasts, name_of
from synkhronos.stores.handle import FileHandle, Needs, RequiredRows, combine, find_same_file

KEPT = 1 << 16  # bytes of a message that is kept in case it comes again
_MASTER = 0

FILE = "file"  # an order of the master: a question

#: The keys of constant arrays that are no longer needed
_Keys = Sequence[Tuple[int, int]]
#: The command, the rows of arrays that came along, and the keys of dropped arrays
_Content = Tuple[bytes, Sequence[ReceivedRows], _Keys]
#: Of an array: the shape and the dtype
_Kind = Tuple[Tuple[int, ...], str]


def _pack(arrays: Sequence[np.ndarray]) -> tuple[bytes, list[np.ndarray]]:
    """Return the bytes of the small arrays, and the other arrays, which are sent by themselves."""
    small = b"".join([array.tobytes() for array in arrays if array.nbytes <= SMALL])
    return small, [array for array in arrays if array.nbytes > SMALL]


def _unpack(small: bytes, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Fill the small arrays with the bytes that `_pack` has returned, and return the others."""
    start, large = 0, []
    for array in arrays:
        if array.nbytes > SMALL:
            large.append(array)
        else:
            as_bytes(array)[...] = np.frombuffer(small, np.uint8, array.nbytes, start)
            start += array.nbytes
    return large


class CommandSender:
    """In the master: sends commands to the other machines, knows which arrays these keep, gets replies.

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
        # By machine, and name: whether it keeps the array
        self._kept: list[dict[Hashable, bool]] = [{} for _ in machines]
        self._nothing: list[list[RequiredRows]] = [[] for _ in self._others]
        self._needs: Needs | None = None  # of the last command that had any
        self._found = self._nothing  # its needs by machine
        self._may_be_kept = False
        self._digests: dict[FileHandle, bytes] = {}

    def find_needed(self, needs: Needs | None) -> list[list[RequiredRows]]:
        """Return the rows that each other machine needs for a command and does not have."""
        if needs is None:
            return self._nothing
        if needs != self._needs:
            found = [combine(needs(self._machines[machine], self._size)) for machine in self._others]
            self._may_be_kept = any([lasts(need.handle) for item in found for need in item])
            self._needs, self._found = needs, found
        if not self._may_be_kept:
            return self._found
        return [
            [sent for need in needed if (sent := self._as_sent(machine, need)) is not None]
            for machine, needed in zip(self._others, self._found)
        ]

    def _as_sent(self, machine: int, need: RequiredRows) -> RequiredRows | None:
        """Return a need in the form in which it is sent, or None if the machine has the array."""
        handle, kept = need.handle, self._kept[machine]
        if not lasts(handle):
            return need
        name = name_of(handle)
        if isinstance(handle, FileHandle):
            if name not in kept:
                kept[name] = self._ask_for_file(machine, handle)
            return None if kept[name] else need
        return None if name in kept else RequiredRows(handle, lasts=True)

    def _ask_for_file(self, machine: int, handle: FileHandle) -> bool:
        if handle not in self._digests:
            self._digests[handle] = digest(self._store.get(handle))
        self._leaders.send_order(machine, CONTROL, FILE, handle, self._digests[handle])
        answer = None
        while answer is None or not answer.is_order:  # a reply to a command of a former world
            answer = self._leaders.receive(machine, REPLY)
        return answer.content()[1]

    def cut(self, needed: list[list[RequiredRows]]) -> list[list[np.ndarray]]:
        """Return the rows of arrays to send to each other machine."""
        return [[self._store.cut(need) for need in item] for item in needed] if any(needed) else []

    def send(
        self,
        payload: bytes,
        needed: list[list[RequiredRows]],
        arrays: list[list[np.ndarray]],
        dropped: _Keys,
    ) -> None:
        """Send a command to the other leaders; for a repeated command, the messages are equal."""
        leaders = self._leaders
        arrays = arrays or self._nothing  # type: ignore[assignment]  # lists that are empty
        for machine, needs, rows in zip(self._others, needed, arrays):
            kinds = [(array.shape, array.dtype.str) for array in rows]
            body = pickle.dumps((payload, dropped, needs, kinds), pickle.HIGHEST_PROTOCOL)
            small, large = _pack(rows)
            leaders.send(machine, CONTROL, ControlMessage(leaders.number, False, body, small))
            for array in large:
                leaders.send_array(machine, array, OF_COMMAND)
            self._kept[machine].update((name_of(need.handle), True) for need in needs if need.lasts)

    def collect(self, idle: bool) -> list[Sequence[bytes | None]]:
        """Wait for the replies of all other machines, and put their arrays into the store.

        Parameters
        ----------
        idle : bool
            Whether there is no time limit.

        Returns
        -------
        list
            By machine, the reply of each rank; the master's machine is left out.
        """
        found, needs, arrays, announced = [], [], [], []
        for machine in self._others:
            message = self._leaders.receive(machine, REPLY, idle)
            while message.number != self._leaders.number:  # it belongs to a world that broke
                message = self._leaders.receive(machine, REPLY, idle)
            replies, handles = pickle.loads(message.body)
            found.append(replies)
            needs += [RequiredRows(handle) for handle in handles]
            room = [self._store.empty(handle.shape, handle.dtype) for handle in handles]
            arrays += room
            announced += [(machine, array) for array in _unpack(message.following, room)]
        self._leaders.receive_arrays(announced, OF_REPLIES)
        self._store.receive(needs, arrays)
        return found

    def take_dropped(self) -> list[tuple[int, int]]:
        """Return the keys of constant arrays that machines no longer need to keep."""
        keys, self._store.dropped[:] = list(self._store.dropped), []
        for kept in self._kept if keys else ():
            for key in keys:
                kept.pop(key, None)
        return keys


class _Opened(NamedTuple):
    """A command as it was received, which is the same object if it is received again.

    Attributes
    ----------
    message : bytes
        The message; empty if it is too long to be kept.
    payload : bytes
        The command.
    dropped : list
        The keys of constant arrays that are no longer needed.
    needed : list of Need
        The rows of arrays that are sent along to this machine.
    kinds : list
        The kinds of these arrays.
    """

    message: bytes
    payload: bytes
    dropped: _Keys
    needed: Sequence[RequiredRows]
    kinds: Sequence[_Kind]


class CommandReceiver:
    """In the leader of another machine: receives commands of the master, and replies to them.

    Parameters
    ----------
    leaders : Leaders
        The leaders of the machines.
    store : MachinesStore
        The store of this rank.
    """

    def __init__(self, leaders: Leaders, store: MachinesStore) -> None:
        self._leaders, self._store = leaders, store
        # Received, and put into the store
        self._command = self._last = _Opened(b"", b"", [], [], [])
        self._following = b""
        self._arrays: list[np.ndarray] = []  # of the last command
        self._files: list[ReceivedRows] = []  # in files of this machine
        self._rows: Sequence[ReceivedRows] = ()

    def receive(self) -> int:
        """Wait for a command; return its number."""
        self._files = []
        while (message := self._leaders.receive_command()).is_order:
            content = message.content()
            if content[0] != FILE:
                # The master has broken this world, and the notice has not been read yet.
                self._leaders.postpone(message)
                raise WorldBrokenError("the master has ended the ranks")
            self._find_file(*content[1:])
        if message.body != self._command.message:  # the same call is often repeated
            kept = message.body if len(message.body) <= KEPT else b""
            self._command = _Opened(kept, *pickle.loads(message.body))
        self._following = message.following
        return message.number

    def _find_file(self, handle: FileHandle, expected: bytes) -> None:
        """Answer whether this machine has a file of the master."""
        own = find_same_file(handle, expected)
        self._leaders.send_order(0, REPLY, FILE, own is not None)
        if own is not None:
            self._files.append(ReceivedRows(RequiredRows(handle, lasts=True), own))

    def open(self) -> _Content:
        """Put the arrays of the command into the store; return the arguments for `Frames.pack`."""
        command, store = self._command, self._store
        store.drop(command.dropped)
        if command is not self._last:
            self._arrays = [store.empty(*kind) for kind in command.kinds]
        large = _unpack(self._following, self._arrays)
        self._leaders.receive_arrays([(_MASTER, array) for array in large], OF_COMMAND)
        if command is not self._last or self._files:
            self._last = command
            self._rows = self._files + store.receive(command.needed, self._arrays)
        store.keep_for_command(self._rows)
        return command.payload, self._rows, command.dropped

    def pack(
        self, replies: Sequence[bytes | None], handles: Sequence[MachineHandle]
    ) -> tuple[ControlMessage, list[np.ndarray]]:
        """Return the replies of this machine's ranks as they are sent, and the arrays that follow them.

        `handles` are of the arrays that the ranks have put into the store.
        """
        small, large = _pack([self._store.get(handle) for handle in handles])
        body = pickle.dumps((replies, handles), pickle.HIGHEST_PROTOCOL)
        return ControlMessage(self._leaders.number, False, body, small), large

    def send(self, message: ControlMessage, arrays: Sequence[np.ndarray]) -> None:
        """Send what `pack` has returned to the master."""
        self._leaders.send(_MASTER, REPLY, message)
        for array in arrays:
            self._leaders.send_array(_MASTER, array, OF_REPLIES)


class Frames:
    """The frames that a leader sends to the other ranks of its machine, packed and unpacked."""

    def __init__(self) -> None:
        self._unpacked: tuple[bytes, _Content] = b"", (b"", (), ())

    def pack(self, payload: bytes, rows: Sequence[ReceivedRows] = (), dropped: _Keys = ()) -> bytes:
        """Return a frame; empty bytes mean the end of the world."""
        return pickle.dumps((payload, rows, dropped), pickle.HIGHEST_PROTOCOL) if payload else b""

    def unpack(self, frame: bytes) -> _Content:
        """Return the arguments of `pack`: the same objects as before for an equal frame."""
        if frame != self._unpacked[0]:
            self._unpacked = frame, pickle.loads(frame)
        return self._unpacked[1]
