"""The leaders of the machines, as one of them sees it: meetings, transfers and notices between them.

A *meeting* is an exchange of items among all leaders inside a command, or the end of transfers of arrays
between some of them. All leaders count the meetings of a command. A *notice* tells the others that
something ends: a rank has failed (`ABORT`); a machine has lost a rank (`BROKEN`); the master ends the
world (`END`); a request to stop was made (`FLAG`); or a leader does not come to a meeting (`Absent`).
Notices carry the number of the command to which they belong, so old ones are ignored.

A leader reads notices while it waits. MPI has to be polled: a leader polls continuously for a short
time, and then sleeps between polls.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import time
from typing import Any, Callable, Sequence

import numpy as np

from synkhronos._errors import CollectiveAbortedError, MissingRankError, WorldBrokenError
from synkhronos.machines.links import Links, LostError, Receipt, as_bytes
from synkhronos.machines.missing import AFTER, ASK, ENDED, Absent
from synkhronos.transports.waiting import Patience

ABORT, BROKEN, END, FLAG = range(4)

# Tags: of notices, of messages between commands, and of the streams of messages inside a command.
_NOTICE, CONTROL, REPLY = range(3)
_ARRAYS = 2  # streams of arrays
_MEETING = _ARRAYS
_STREAMS = _ARRAYS + 1
_FIRST, _NUMBERS = 16, 1 << 20
END_OF_TAGS = _FIRST + _STREAMS * _NUMBERS

# A leader that waits sleeps for a share of the time that it has waited, so it is late by this share.
SHARE = 0.02
SHORTEST_NAP = 2e-5  # seconds
LONGEST_NAP = 1e-3  # inside a command
_LONGEST_IDLE_NAP = 2e-2

_STILL_ARRIVING = 100  # commands after an aborted one in which its messages are discarded

_POLLS = range(4)  # polls between two readings of the clock; each takes about 2 microseconds

_SMALL = 4096  # bytes of an array that is sent in the message that announces it
_KEPT = 1 << 16  # bytes of a pickle that is kept in case it is sent again
_HEAD = struct.Struct("=qQ")  # of a message: the number of its command, and the length of the pickle


def _tag(number, stream):
    return _FIRST + _STREAMS * (number % _NUMBERS) + stream


class Leaders:
    """The leader of this machine, among the leaders ``0..size-1``.

    Parameters
    ----------
    links : Links

    Attributes
    ----------
    number : int
        The number of the command. It keeps increasing from world to world.
    passed : int
        The meetings of this command that this leader has passed.
    watch : callable
        ``watch(inside)`` is called while it waits, in a meeting or not. It raises if this machine's
        ranks cannot continue.
    labels : list of str
        The ranks of each machine, for messages to users.
    leave : callable
        Called when a meeting cannot be passed. It lets this machine's ranks leave theirs.
    may_poll : bool
        Whether there is a core for each rank of this machine, so that this leader may poll.
    expire : callable
        ``expire(seconds)`` is called while it waits inside a command, with the time it has waited. It
        raises if that is too long.
    first_number : int
        The number of the first command of this world.
    flag : int
        The largest number of the notices `FLAG` of this command.
    clock : callable
        Returns the time on this machine in seconds. Machines have different ones.
    """

    def __init__(self, links: Links) -> None:
        self.links = links
        self.rank, self.size = links.rank, links.size
        self.number = self.passed = 0
        self.watch: Callable[[bool], None] = lambda inside: None
        self.labels = [str(machine) for machine in range(self.size)]
        self.leave: Callable[[], None] = lambda: None
        self.may_poll = True
        self.expire: Callable[[float], None] = lambda seconds: None
        self.first_number = 0
        self._notices: list[tuple] = []  # of later commands
        self._aborted = 0  # the first meeting that cannot be passed, from 1; 0 if all can
        self.absent = Absent(self.notify)
        self.flag = 0
        self.clock: Callable[[], float] = time.perf_counter
        self._broken: tuple[int, str] | None = None  # the number of the command, and the cause
        self._postponed: tuple[int, Any] | None = None
        # By leader and tag: the last object with its arrays' types, pickled and not, if it is not large.
        self._sent: dict[tuple[int, int], tuple[Any, Any, bytes]] = {}
        self._received: dict[tuple[int, int], tuple[bytes, Any]] = {}
        self._aborted_commands: list[int] = []  # their numbers, while messages may still arrive
        self._receiving: dict[Receipt, None] = {}  # a set in the order of insertion
        self._inside = Patience()
        self._between = Patience(self._inside)

    # Worlds

    def begin_world(self) -> None:
        """Start a world with the command that has begun."""
        self.first_number = self.number

    def end_world(self) -> None:
        """End the world; notices that belong to it are ignored from now on."""
        self.first_number = self.number + 1

    # Commands

    def begin(self, number: int) -> None:
        """Start a command."""
        if self._aborted:
            self._aborted_commands.append(self.number)
        for aborted in self._aborted_commands:
            for stream in range(_STREAMS):
                self.links.discard(_tag(aborted, stream))
        self._aborted_commands = [
            one for one in self._aborted_commands if number - one < _STILL_ARRIVING
        ]
        self.number, self.passed, self._aborted, self.flag = number, 0, 0, 0
        self.absent.begin()
        early, self._notices = self._notices, []
        for notice in early:
            self._take(notice)

    def send(self, to: int, tag: int, content: Any, arrays: Sequence[np.ndarray] = ()) -> None:
        """Send an object, and C-contiguous arrays that must not change in this command.

        If it is the same object as the last time, and not large, it is not pickled again.
        """
        kinds = [(array.shape, array.dtype.str, array.nbytes <= _SMALL) for array in arrays]
        last, last_kinds, pickled = self._sent.get((to, tag), (None, None, b""))
        if content is not last or kinds != last_kinds:
            pickled = pickle.dumps((content, kinds), pickle.HIGHEST_PROTOCOL)
            if len(pickled) <= _KEPT:
                self._sent[to, tag] = content, kinds, pickled
        small = [array.tobytes() for array in arrays if array.nbytes <= _SMALL]
        head = _HEAD.pack(self.number, len(pickled))
        self.links.send(to, tag, b"".join([head, pickled, *small]))
        for array in arrays:
            if array.nbytes > _SMALL:
                self.links.send(to, tag, array)

    def receive(
        self,
        source: int,
        tag: int,
        allocate: Callable[[tuple[int, ...], str], np.ndarray],
        idle: bool = False,
        former: tuple[Any, list[np.ndarray]] = (None, []),
    ) -> tuple[int, Any, list[np.ndarray]]:
        """Wait for what `send` sent; return its command's number, the object and the arrays.

        It is the same object as the last time if it was sent again; it must not be changed.

        Parameters
        ----------
        allocate : callable
            ``allocate(shape, dtype)`` returns memory for an array.
        idle : bool
            Whether there is no time limit.
        former : (object, list of numpy.ndarray)
            What a former call returned. If the same object was sent again, its arrays are received into
            the same memory.
        """
        if tag == CONTROL and self._postponed is not None:
            postponed, self._postponed = self._postponed, None
            return (*postponed, [])
        message = self.wait(lambda: self.links.receive(source, tag), idle)[1]
        number, length = _HEAD.unpack_from(message)
        start = _HEAD.size + length
        pickled = message[_HEAD.size : start]
        last, found = self._received.get((source, tag), (None, None))
        if pickled != last:  # the same call is often repeated
            found = pickle.loads(pickled)
            if length <= _KEPT:
                self._received[source, tag] = pickled, found
        content, kinds = found
        arrays = former[1]
        if content is not former[0]:
            arrays = [allocate(shape, dtype) for shape, dtype, _ in kinds]
        for array, (*_, is_small) in zip(arrays, kinds):
            if is_small:
                as_bytes(array)[...] = np.frombuffer(message, np.uint8, array.nbytes, start)
                start += array.nbytes
            else:
                self.wait(self.links.receive_into(source, tag, array).is_complete)
        return number, content, arrays

    def postpone(self, number: int, content: Any) -> None:
        """Let the next `receive` with the tag `CONTROL` return this message."""
        self._postponed = number, content

    # Inside a command

    def exchange(self, item: bytes) -> list[bytes]:
        """Return the bytes `item` of every leader, by rank, after a meeting.

        In round k, a leader sends what it knows to the leader ``2**k`` before it, which takes
        ``ceil(log2(size))`` rounds (Bruck et al. 1997: Efficient algorithms for all-to-all
        communications).
        """
        items, distance = [item], 1
        while distance < self.size:
            count = min(distance, self.size - distance)
            known = pickle.dumps(items[:count]) if count > 1 else items[0]
            self.send_inside((self.rank - distance) % self.size, known)
            received = self.receive_inside((self.rank + distance) % self.size)
            items += pickle.loads(received) if count > 1 else [received]
            distance *= 2
        self.passed += 1
        return [items[(rank - self.rank) % self.size] for rank in range(self.size)]

    def send_inside(self, to: int, data: bytes) -> None:
        """Send bytes to a leader, as a part of a meeting."""
        self.links.send(to, self._tag(_MEETING), data)

    def receive_inside(self, source: int) -> bytes:
        """Return the bytes that another leader has sent in this meeting."""
        return self.wait_inside(lambda: self.links.receive(source, self._tag(_MEETING)))[1]

    def barrier(self) -> None:
        """Wait until every leader has called this method."""
        self.exchange(b"")

    def send_array(self, to: int, array: np.ndarray, stream: int = 0) -> int:
        """Start to send a C-contiguous array; return a number for `complete`."""
        return self.links.send(to, self._tag(stream), array)

    def receive_array(self, source: int, array: np.ndarray, stream: int = 0) -> Any:
        """Start to receive an array; return a receipt for `complete`."""
        receipt = self.links.receive_into(source, self._tag(stream), array)
        self._receiving[receipt] = None
        return receipt

    def complete(self, receipts: Sequence[Any], sent: Sequence[int] = ()) -> None:
        """Wait until arrays have been received and sent. It is a meeting.

        Leaders without arrays take part in it, too. If it raises, no array is being received any more.
        """
        for receipt in receipts:
            self.wait_inside(receipt.is_complete)
            self._receiving.pop(receipt, None)
        for number in sent:
            self.wait_inside(lambda number=number: self.links.is_sent(number))
        self.passed += 1

    def wait_inside(self, ready: Callable[[], Any], meets: bool = True) -> Any:
        """Like `wait`, inside a command; raise if a rank has left it, or does not come to this meeting.

        `meets` is False if this leader waits for its own machine.
        """

        def ready_or_aborted():
            found = ready()
            if not found and 0 < self._aborted <= self.passed + 1:
                self.leave()
                raise CollectiveAbortedError(
                    "a rank left a collective: a rank of another machine failed in this command"
                )
            if not found and meets:
                self._check_missing()
            return found

        try:
            return self.wait(ready_or_aborted, inside=True)
        except BaseException:
            for receipt in reversed(self._receiving):
                receipt.cancel()
            self._receiving.clear()
            raise

    def _check_missing(self):
        machine = self.absent.find(self.passed)
        if machine is not None and not self._aborted:
            raise MissingRankError(
                f"a rank waits in a collective for rank {self.labels[machine]}, which ended the "
                f"program without it; let every rank call the same collectives in the same order"
            )

    def _tag(self, stream):
        return _tag(self.number, stream)

    # Notices

    def notify(self, kind: int, value: Any = None, to: Sequence[int] | None = None) -> None:
        """Send a notice, by default to all other leaders."""
        notice = pickle.dumps((self.number, kind, self.rank, value))
        for machine in range(self.size) if to is None else to:
            if machine != self.rank:
                with contextlib.suppress(LostError):
                    self.links.send(machine, _NOTICE, notice)

    def abort(self) -> None:
        """Let the other leaders leave all meetings of this command that this one has not passed."""
        if not self._aborted or self._aborted > self.passed + 1:
            self._aborted = self.passed + 1
        self.notify(ABORT, self._aborted)

    @property
    def is_aborted(self) -> bool:
        """Whether a meeting of this command cannot be passed, as far as this leader knows."""
        return bool(self._aborted)

    def read_notices(self) -> None:
        """Read the notices that have arrived.

        Raises
        ------
        WorldBrokenError
            If a machine has lost a rank, or the master ends the world: in each call until `end_world`,
            as a program may catch it. `LostError`, if it has died.
        """
        while (received := self.links.receive(None, _NOTICE)) is not None:
            self._take(pickle.loads(received[1]))
        if self._broken is not None and self._broken[0] >= self.first_number:  # of this world
            raise WorldBrokenError(self._broken[1])

    def _take(self, notice):
        number, kind, machine, value = notice
        if number > self.number:
            self._notices.append(notice)
        elif kind in (BROKEN, END):
            if self._broken is None or number > self._broken[0]:
                self._broken = number, value
        elif number < self.number:
            pass
        elif kind == ABORT:
            self._aborted = min(self._aborted or value, value)
        elif kind in (ASK, ENDED):
            self.absent.take(kind, machine, value)
        else:
            self.flag = max(self.flag, value)

    # Waiting

    def wait(self, ready: Callable[[], Any], idle: bool = False, inside: bool = False) -> Any:
        """Return the value of ``ready()`` when it is true, and read notices meanwhile."""
        found = ready()
        if found:
            return found
        began = time.monotonic()
        patience = self._between if idle else self._inside
        worked = began - patience.resumed
        found = self._poll(ready, patience, began, worked)
        longest = _LONGEST_IDLE_NAP if idle else LONGEST_NAP
        while not found:
            self.read_notices()
            self.watch(inside)
            waited = time.monotonic() - began
            if inside and waited > AFTER:
                self.absent.ask(self.passed)
            if not idle:
                self.expire(waited)
            found = ready()
            if not found:
                time.sleep(min(max(SHARE * waited, SHORTEST_NAP), longest))
        patience.learn(worked, patience.resume() - began)
        return found

    def _poll(self, ready, patience, began, worked):
        if not self.may_poll:
            return None
        until = began + patience.fraction * patience.limit(worked)
        while time.monotonic() < until:
            for _ in _POLLS:
                found = ready()
                if found:
                    return found
            os.sched_yield()  # another leader may be on this core
        return None
