"""The leaders of the machines, as one of them sees it: meetings, transfers and notices between them.

`Links` are the messages between them; ``tests/specifications/links.py`` specifies these.

A *meeting* is an exchange of items among all leaders inside a command, or the end of transfers of arrays
between some of them. All leaders count the meetings of a command. A *notice* tells the others that
something ends: a rank has failed (`ABORT`); a machine has lost a rank (`BROKEN`); the master ends the
world (`END`); a request to stop was made (`FLAG`); or a leader does not come to a meeting (`ENDED`).
Notices carry the number of the command to which they belong, so old ones are ignored.

Between commands, the master sends commands and orders to the other leaders, which send replies and
answers. They arrive in the order in which they were sent, so what is left of a broken world comes before
the order that starts the next one.

A leader reads notices while it waits. MPI has to be polled: a leader polls continuously for a short
time, and then sleeps between polls.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import struct
import time
from abc import ABC, abstractmethod
from typing import Any, Callable, Collection, NamedTuple, Sequence, Tuple

import numpy as np

from synkhronos._errors import REMEDY, CollectiveAbortedError, MissingRankError, WorldBrokenError
from synkhronos.arithmetic.machines import Ping, Reading, read_clock
from synkhronos.transports.base import do_nothing
from synkhronos.transports.waiting import SpinPolicy

ABORT, BROKEN, END, FLAG, ASK, ENDED = range(6)  # notices

# Tags: of notices, of messages between commands, and of the streams of messages inside a command.
_NOTICE, CONTROL, REPLY = range(3)
_ARRAYS = 2  # streams of arrays
_MEETING = _ARRAYS
#: The streams of large arrays that belong to a command and to the replies
OF_COMMAND, OF_REPLIES = _ARRAYS + 1, _ARRAYS + 2
_STREAMS = OF_REPLIES + 1
_FIRST, _NUMBERS = 16, 1 << 20
END_OF_TAGS = _FIRST + _STREAMS * _NUMBERS

# A leader that waits sleeps for a share of the time that it has waited, so it is late by this share.
_SHARE = 0.02
_SHORTEST_NAP = 2e-5  # seconds
_LONGEST_NAP = 1e-3  # inside a command
LONGEST_IDLE_NAP = 2e-2

_ASKS_AFTER = 0.01  # seconds of waiting after which a leader asks whether the others come

_STILL_ARRIVING = 100  # commands after an aborted one in which its messages are discarded

_POLLS = range(4)  # polls between two readings of the clock; each takes about 2 microseconds

SMALL = 4096  # bytes of an array that is sent in the message that announces it
_NEVER = 1 << 62  # the number of no command

#: The number of pings for a reading of a clock. Some of them are short, also on machines that are busy.
PINGS = 30
_TIME = struct.Struct("=d")

#: The number of the command, the kind, the machine that sent it, and a value of the kind
_Notice = Tuple[int, int, int, Any]


def as_bytes(data: bytes | np.ndarray) -> np.ndarray:
    """Return the bytes of a C-contiguous array or of a bytes object, as a 1-d view."""
    if isinstance(data, np.ndarray):
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


def nap_after(waited: float, longest: float = _LONGEST_NAP) -> float:
    """Return for how long to sleep before the next look, after a wait of some seconds."""
    return min(max(_SHARE * waited, _SHORTEST_NAP), longest)


class LostError(WorldBrokenError):
    """Other tasks have ended, and MPI continues, which requires ULFM; without it, MPI ends the job.

    Parameters
    ----------
    names : sequence of str
        How messages refer to the tasks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"{' and '.join(names)} left the job: its first process has died, or cannot be reached; "
            f"{REMEDY}"
        )


class Receipt(ABC):
    """A message that is being received into an array."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the whole message has arrived."""

    @abstractmethod
    def cancel(self) -> None:
        """Stop writing to the array.

        Cancel the receipts of a source and tag in reverse order. A message that arrives is received by
        the first one that is not cancelled; in another order, that may be one for a shorter message.
        """


class Links(ABC):
    """Messages among leaders ``0..size-1``. No method waits.

    Messages from one leader to another with the same tag arrive in the order in which they were sent.
    When leaders have died, methods raise `LostError` for messages to them, from them or from any leader.

    Attributes
    ----------
    rank, size : int
        The number of this leader, and the number of all leaders.
    names : sequence of str, optional
        The names of the leaders in messages to users.
    """

    rank: int
    size: int
    names: Sequence[str] = ()

    @abstractmethod
    def lost(self) -> Collection[int]:
        """Return the leaders that are known to have died."""

    def acknowledge(self) -> None:  # noqa: B027
        """Let messages from any of the remaining leaders be received again."""

    def lost_error(self) -> LostError:
        """Return the error for the leaders that have died."""
        return LostError(
            [self.names[item] if self.names else f"task {item}" for item in sorted(self.lost())]
        )

    @abstractmethod
    def send(self, to: int, tag: int, data: bytes | np.ndarray) -> int:
        """Start to send bytes or a C-contiguous array, which must not change until they are sent.

        Returns a number for `is_sent`.
        """

    @abstractmethod
    def is_sent(self, number: int) -> bool:
        """Whether the memory of a message may be changed again."""

    @abstractmethod
    def receive(self, source: int | None, tag: int) -> tuple[int, bytes | bytearray] | None:
        """Return the source and the bytes of the next message with a tag, or None if there is none.

        Parameters
        ----------
        source : int or None
            None for any leader.
        """

    @abstractmethod
    def receive_into(self, source: int, tag: int, array: np.ndarray) -> Receipt:
        """Start to receive the next message from `source` into a C-contiguous array of its size."""

    @abstractmethod
    def discard(self, tag: int) -> None:
        """Receive and forget the messages with a tag that have arrived."""


def _tag(number: int, stream: int) -> int:
    return _FIRST + _STREAMS * (number % _NUMBERS) + stream


class Leaders:
    """The leader of this machine, among the leaders ``0..size-1``.

    Parameters
    ----------
    links : Links
        The links between the leaders.
    clock : callable, optional
        Returns the time on this machine in seconds. The clocks of machines differ.

    Attributes
    ----------
    number : int
        The number of the command. It keeps increasing from world to world.
    passed : int
        The meetings of this command that this leader has passed.
    first_number : int
        The number of the first command of this world; larger than any between worlds.
    ended : EndedLeaders
        The leaders that have ended the command.
    """

    def __init__(self, links: Links, clock: Callable[[], float] = time.perf_counter) -> None:
        self.links, self.clock = links, clock
        self.rank, self.size = links.rank, links.size
        self.number = self.passed = 0
        self._notices: list[_Notice] = []  # of later commands
        self._aborted = 0  # the first meeting that cannot be passed, from 1; 0 if all can
        self.ended = EndedLeaders(self._notify_of_end)
        self._flag: np.ndarray | None = None
        self._highest = 0  # of the notices `FLAG` of this command
        self._broken: tuple[int, str] | None = None  # the number of the command, and the cause
        self._postponed: list[ControlMessage] = []  # orders for the loop that starts worlds
        self._aborted_commands: list[int] = []  # their numbers, while messages may still arrive
        self._receiving: dict[Receipt, None] = {}  # a set in the order of insertion
        self._inside = SpinPolicy()
        self._between = SpinPolicy(self._inside)
        self.begin_world()

    # Worlds

    def begin_world(
        self,
        labels: Sequence[str] | None = None,
        may_poll: bool = True,
        watch: Callable[[bool], None] = do_nothing,
        expire: Callable[[float], None] = do_nothing,
        leave: Callable[[], None] = do_nothing,
    ) -> None:
        """Start a world with the command that has begun.

        Parameters
        ----------
        labels : sequence of str, optional
            The ranks of each machine, for messages to users.
        may_poll : bool
            Whether there is a core for each rank of this machine, so that this leader may poll.
        watch : callable, optional
            ``watch(inside)`` is called while it waits, in a meeting or not. It raises if this machine's
            ranks cannot continue.
        expire : callable, optional
            ``expire(seconds)`` is called while it waits inside a command, with the time it has waited.
            It raises if that is too long.
        leave : callable, optional
            Called when a meeting cannot be passed. It lets this machine's ranks leave theirs.
        """
        self.first_number = self.number
        self._labels = list(map(str, range(self.size))) if labels is None else labels
        self._may_poll, self._watch, self._expire, self._leave = may_poll, watch, expire, leave

    def end_world(self) -> None:
        """End the world; notices that belong to it are ignored from now on."""
        self.begin_world()
        self.first_number = _NEVER

    # Commands

    def begin(self, number: int) -> None:
        """Start a command."""
        if self._aborted:
            self._aborted_commands.append(self.number)
        self._discard(number)
        self.number, self.passed, self._aborted = number, 0, 0
        self._flag, self._highest = None, 0
        self.ended.begin()
        early, self._notices = self._notices, []
        for notice in early:
            self._take(notice)

    def begin_first(self, number: int) -> None:
        """Start the command before the first one of a world.

        The world before may have ended in the midst of a command, which may not have come here.
        """
        self._aborted_commands += {self.number, number - 1} - {0}
        self.begin(number)

    def _discard(self, number: int) -> None:
        """Discard the messages of aborted commands that have arrived, before a command."""
        for aborted in self._aborted_commands:
            with contextlib.suppress(LostError):  # `read_notices` raises it
                for stream in range(_STREAMS):
                    self.links.discard(_tag(aborted, stream))
        self._aborted_commands = [
            item for item in self._aborted_commands if number - item < _STILL_ARRIVING
        ]

    # Between commands

    def send_order(self, to: int, tag: int, *content: Any) -> None:
        """Send a tuple of objects that is no command and no reply."""
        order = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
        self.send(to, tag, ControlMessage(self.number, True, order))

    def send(self, to: int, tag: int, message: ControlMessage) -> None:
        """Send a message."""
        self.links.send(to, tag, pickle.dumps(tuple(message), pickle.HIGHEST_PROTOCOL))

    def receive(self, source: int | None, tag: int, idle: bool = False) -> ControlMessage:
        """Wait for a message, from any leader if `source` is None.

        `idle` is whether there is no time limit.
        """
        message = self.wait(lambda: self.links.receive(source, tag), idle)[1]
        return ControlMessage(*pickle.loads(message))

    def receive_order(self) -> ControlMessage:
        """Wait for an order, between worlds; drop the commands of a world that was broken."""
        while not (message := self.receive_command()).is_order:
            pass
        return message

    def receive_command(self) -> ControlMessage:
        """Wait for the next command of this world, or an order."""
        return self._postponed.pop(0) if self._postponed else self.receive(None, CONTROL, True)

    def postpone(self, order: ControlMessage) -> None:
        """Let the next call of `receive_order` return this order."""
        self._postponed.append(order)

    def receive_arrays(self, announced: Sequence[tuple[int, np.ndarray]], stream: int) -> None:
        """Receive the arrays of a command or of replies, each from a leader, and wait for them."""
        receipts = [self.receive_array(source, array, stream) for source, array in announced]
        try:
            for receipt in receipts:
                self.wait(receipt.is_complete)
                del self._receiving[receipt]
        except BaseException:
            self._cancel()
            raise

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
            self._send_inside((self.rank - distance) % self.size, known)
            received = self._receive_inside((self.rank + distance) % self.size)
            items += pickle.loads(received) if count > 1 else [received]
            distance *= 2
        self.passed += 1
        return [items[(rank - self.rank) % self.size] for rank in range(self.size)]

    def _send_inside(self, to: int, data: bytes) -> None:
        self.links.send(to, self._tag(_MEETING), data)

    def _receive_inside(self, source: int) -> bytes:
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
            self.wait_inside(functools.partial(self.links.is_sent, number))
        self.passed += 1

    def wait_inside(self, ready: Callable[[], Any], meets: bool = True) -> Any:
        """Like `wait`, inside a command; raise if a rank has left it, or does not come to this meeting.

        `meets` is False if this leader waits for its own machine.
        """

        def ready_or_aborted() -> Any:
            found = ready()
            if not found and 0 < self._aborted <= self.passed + 1:
                self._leave()
                raise CollectiveAbortedError(
                    "a rank left a collective: a rank of another machine failed in this command"
                )
            if not found and meets:
                self._check_missing()
            return found

        try:
            return self.wait(ready_or_aborted, inside=True)
        except BaseException:
            self._cancel()
            raise

    def _cancel(self) -> None:
        for receipt in reversed(self._receiving):
            receipt.cancel()
        self._receiving.clear()

    def _check_missing(self) -> None:
        machine = self.ended.find(self.passed)
        if machine is not None and not self._aborted:
            raise MissingRankError(
                f"a rank waits in a collective for rank {self._labels[machine]}, which ended the "
                f"program without it; let every rank call the same collectives in the same order"
            )

    def _tag(self, stream: int) -> int:
        return _tag(self.number, stream)

    # Notices

    def notify(self, kind: int, value: Any = None, to: Sequence[int] | None = None) -> None:
        """Send a notice, by default to all other leaders."""
        notice = pickle.dumps((self.number, kind, self.rank, value))
        for machine in range(self.size) if to is None else to:
            if machine != self.rank:
                with contextlib.suppress(LostError):
                    self.links.send(machine, _NOTICE, notice)

    def _notify_of_end(self, kind: int, passed: int, to: Sequence[int] | None = None) -> None:
        # After a failure, others leave by its own notice, which may arrive later, and tells the cause.
        if kind == ASK or not self._aborted:
            self.notify(kind, passed, to)

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

    def _take(self, notice: _Notice) -> None:
        number, kind, machine, value = notice
        if kind in (BROKEN, END):  # also of a command that does not come here any more
            if self._broken is None or number > self._broken[0]:
                self._broken = number, value
        elif number > self.number:
            self._notices.append(notice)
        elif number < self.number:
            pass
        elif kind == ABORT:
            self._aborted = min(self._aborted or value, value)
        elif kind in (ASK, ENDED):
            self.ended.take(kind, machine, value)
        else:
            self._highest = max(self._highest, value)

    # A request to stop

    def spread(self, flag: np.ndarray) -> None:
        """In this command, let all machines see the highest value of a number in their named memory."""
        self._flag = flag

    def pass_on_flag(self) -> None:
        """Raise the number to the highest on the other machines, or tell them if it is higher here."""
        if self._flag is None:
            return
        own = int(self._flag[0])
        if own > self._highest:
            self._highest = own
            self.notify(FLAG, own)
        elif own < self._highest:
            self._flag[0] = self._highest

    # Clocks

    def compare_clocks(self) -> list[Reading]:
        """Read the clock of each machine, a meeting of all leaders.

        The master's machine reads one after another, as messages that travel at the same time would hold
        each other up.

        Returns
        -------
        list of Reading
            By machine; empty for other leaders than the master's.
        """
        readings = []
        if self.rank == 0:
            now = self.clock()
            readings = [Reading(now, now, 0.0)]
            for machine in range(1, self.size):
                readings.append(read_clock([self._ping(machine) for _ in range(PINGS)]))
        else:
            for _ in range(PINGS):
                self._receive_inside(0)
                self._send_inside(0, _TIME.pack(self.clock()))
        self.passed += 1
        return readings

    def _ping(self, machine: int) -> Ping:
        sent = self.clock()
        self._send_inside(machine, b"")
        answer = self._receive_inside(machine)
        received = self.clock()
        return Ping(sent, _TIME.unpack(answer)[0], received)

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
        longest = LONGEST_IDLE_NAP if idle else _LONGEST_NAP
        while not found:
            self.read_notices()
            self._watch(inside)
            waited = time.monotonic() - began
            if inside and waited > _ASKS_AFTER:
                self.ended.ask(self.passed)
            if not idle:
                self._expire(waited)
            found = ready()
            if not found:
                time.sleep(nap_after(waited, longest))
        patience.learn(worked, patience.resume() - began)
        return found

    def _poll(self, ready: Callable[[], Any], patience: SpinPolicy, began: float, worked: float) -> Any:
        if not self._may_poll:
            return None
        until = began + patience.fraction * patience.limit(worked)
        while time.monotonic() < until:
            for _ in _POLLS:
                found = ready()
                if found:
                    return found
            os.sched_yield()  # another leader may be on this core
        return None


class ControlMessage(NamedTuple):
    """A message between commands.

    Attributes
    ----------
    number : int
        The number of the command, or of the last one before an order.
    is_order : bool
        Whether it is an order of the master, or the answer to one, and no command and no reply.
    body : bytes
        The contents.
    following : bytes
        Bytes that follow, which may differ when the same contents are sent again.
    """

    number: int
    is_order: bool
    body: bytes
    following: bytes = b""

    def content(self) -> Any:
        """Return the object that an order, or the answer to it, consists of."""
        return pickle.loads(self.body)


class EndedLeaders:
    """Leaders that have ended a command without coming to a meeting at which others still wait.

    A leader says so only if it is asked: one that has waited for a while asks all others, once in each
    meeting. So a command in which all ranks do the same needs no further message.

    Parameters
    ----------
    notify : callable
        ``notify(kind, passed, to)`` sends a notice to the leaders `to`, by default to all.
    """

    def __init__(self, notify: Callable[..., None]) -> None:
        self._notify = notify
        self.begin()

    def begin(self) -> None:
        """Start a command."""
        self._own: int | None = None  # how many meetings this leader has passed, once it has ended
        self._asked: int | None = None  # in which meeting this leader has asked
        self._asking: dict[int, int] = {}  # by leader: how many meetings it has passed
        self._ended: dict[int, int] = {}

    def ask(self, passed: int) -> None:
        """Ask the others whether they come to the meeting after the first `passed`."""
        if self._asked != passed:
            self._asked = passed
            self._notify(ASK, passed)

    def end(self, passed: int) -> None:
        """Note that this leader has ended the command, and has passed so many meetings."""
        self._own = passed
        for machine, others in self._asking.items():
            self._answer(machine, others)

    def take(self, kind: int, machine: int, passed: int) -> None:
        """Take a notice of another leader."""
        if kind == ENDED:
            self._ended[machine] = passed
        else:
            self._asking[machine] = passed
            if self._own is not None:
                self._answer(machine, passed)

    def _answer(self, machine: int, passed: int) -> None:
        if self._own <= passed:  # type: ignore[operator]  # it has ended
            self._notify(ENDED, self._own, [machine])

    def find(self, passed: int) -> int | None:
        """Return a leader that does not come to the meeting after the first `passed`, or None."""
        return next((item for item, others in self._ended.items() if others <= passed), None)
