"""The messages that the progress processes of several machines exchange while a program runs.

`Relay` is the work of a progress process, which runs the parts. `MirroredNumbers` copy numbers and
reports of each machine's ranks to all machines. `RelayedMessages` go to their receivers, and
`RelayedQuestions` to the controller; `RelayedStripes` are the stripes of a center for ranks of other
machines.
"""

from __future__ import annotations

import collections
import math
import pickle
import time
from abc import ABC, abstractmethod
from typing import Any, Sequence

import numpy as np

from synkhronos.machines.leaders import END_OF_TAGS, LONGEST_IDLE_NAP, nap_after
from synkhronos.machines.progress_process import WorkContext
from synkhronos.services.controller import READY, ControllerMemory
from synkhronos.services.messages import BELLS, Mailbox, Taken, box_of, full_boxes
from synkhronos.services.registers import ENDED, NUMBERS, RESTARTS, LatestReports, wakeup_semaphores
from synkhronos.services.stripes import Request, StripeChannel, Stripes
from synkhronos.stores.named_memory import NamedMemory

_FIRST_TAG, _TAGS = END_OF_TAGS, 2  # progress processes also meet as leaders do
_NUMBERS = 1 << 20


class RelayContext:
    """The objects with which the parts of the relay of a machine work, and their messages.

    Parameters
    ----------
    work : WorkContext
        The objects with which the progress process works.
    machines : list of range
        The ranks of each machine.

    Attributes
    ----------
    named_memory : NamedMemory
        The named memory of the machine.
    machine : int
        The number of the machine.
    own : range
        The ranks of this machine.
    others : list of int
        The other machines.
    size : int
        The number of all ranks.
    """

    def __init__(self, work: WorkContext, machines: Sequence[range]) -> None:
        self.named_memory, self._links, self.machine = work.named_memory, work.links, work.links.rank
        self._tag = _FIRST_TAG + _TAGS * (work.number % _NUMBERS)
        self.machines, self.own = machines, machines[self.machine]
        self.others = [machine for machine in range(len(machines)) if machine != self.machine]
        self.size = sum(map(len, machines))

    def machine_of(self, rank: int) -> int:
        """Return the machine of a rank."""
        return next(machine for machine, ranks in enumerate(self.machines) if rank in ranks)

    def send(self, to: int, part: str, *content: Any) -> None:
        """Send to the same part on another machine."""
        self._links.send(to, self._tag, pickle.dumps((part, content), pickle.HIGHEST_PROTOCOL))

    def receive(self) -> tuple[int, str, tuple[Any, ...]] | None:
        """Return the machine, the part and the content of the next message; None if there is none."""
        received = self._links.receive(None, self._tag)
        return None if received is None else (received[0], *pickle.loads(received[1]))

    def send_piece(self, to: int, piece: np.ndarray) -> None:
        """Start to send memory, which must not change until it has arrived."""
        self._links.send(to, self._tag + 1, piece)

    def receive_piece(self, source: int) -> np.ndarray | None:
        """Return the next piece from a machine, or None."""
        received = self._links.receive(source, self._tag + 1)
        return None if received is None else np.frombuffer(received[1], np.uint8)

    def discard(self) -> None:
        """Forget all that has arrived."""
        self._links.discard(self._tag)
        self._links.discard(self._tag + 1)


class RelayPart(ABC):
    """A part of the relay of one machine."""

    name: str

    def __init__(self, context: RelayContext) -> None:
        self.context, self.named_memory = context, context.named_memory

    @abstractmethod
    def look(self) -> bool:
        """Send the changes of this machine; return whether anything was done."""

    @abstractmethod
    def take(self, source: int, *content: Any) -> None:
        """Handle a message of the same part on another machine."""

    def send(self, to: int, *content: Any) -> None:
        """Send to the same part on another machine."""
        self.context.send(to, self.name, *content)

    def send_to_others(self, *content: Any) -> None:
        """Send to the same part on all other machines."""
        for machine in self.context.others:
            self.send(machine, *content)


# Messages to ranks of other machines


_RETRY = 2e-3  # seconds after which a message is offered again
_PATIENCE = 1.0  # seconds without room after which a mailbox counts as not being read


class _Expected:
    """A message from another machine that was accepted for a rank, and whether there are more for it."""

    def __init__(self, box: Mailbox, rank: int, slot: int, nbytes: int, more: bool) -> None:
        self._box, self._slot, self._pieces = box, slot, box.pieces(slot, nbytes)
        self.rank, self.more, self._left = rank, more, nbytes

    def add(self, piece: np.ndarray) -> bool:
        """Write the next piece; return whether it was the last."""
        next(self._pieces)[...] = piece
        self._left -= piece.size
        if not self._left:
            self._box.publish(self._slot)
        return not self._left


class RelayedMessages(RelayPart):
    """Passes on messages to and from this machine.

    A rank puts a message for any rank into a mailbox on its own machine. The progress process takes
    messages for ranks of another machine, and offers them to the progress process there, which accepts a
    message if the receiver's own mailbox has room. Otherwise the message stays where it is, so that the
    sender's mailbox becomes full as well.
    """

    name = "messages"

    def __init__(self, context: RelayContext) -> None:
        super().__init__(context)
        self._bells = wakeup_semaphores(self.named_memory, BELLS, context.size)
        self._boxes = {
            rank: Mailbox(self.named_memory, box_of(rank))
            for machine in context.others
            for rank in context.machines[machine]
        }
        self._full = full_boxes(self.named_memory, context.size)
        # By rank, the machines that have more messages for it
        self._more: dict[int, set[int]] = {rank: set() for rank in context.own}
        self._sending: dict[int, Taken] = {}  # by receiver
        self._refused: dict[int, tuple[float, float]] = {}  # by receiver: first and last time
        self._expected: dict[int, collections.deque[_Expected]] = {
            machine: collections.deque() for machine in context.others
        }

    # What leaves

    def look(self) -> bool:
        changed = False
        for rank, box in self._boxes.items():
            if rank in self._sending:
                continue
            if box.has_messages() and time.monotonic() - self._refused.get(rank, (0, 0))[1] > _RETRY:
                changed = self._offer(rank, box) or changed
        for source in self._expected:
            changed = self._receive(source) or changed
        return changed

    def _offer(self, rank: int, box: Mailbox) -> bool:
        taken = box.take(None)
        if taken is None:
            return False
        self._sending[rank] = taken
        self.send(self.context.machine_of(rank), "offer", rank, *taken[1:], box.has_messages())
        return True

    def have_arrived(self) -> bool:
        """Whether all messages from here have arrived, except to ranks that do not read theirs."""
        latest = time.monotonic() - _PATIENCE
        return not any(
            (rank in self._sending or box.has_messages())
            and self._refused.get(rank, (math.inf, 0))[0] > latest
            for rank, box in self._boxes.items()
        )

    # What arrives

    def take(self, source: int, kind: str, rank: int, *content: Any) -> None:
        if kind == "offer":
            self._consider(source, rank, *content)
        elif kind == "full":
            self._boxes[rank].put_back(self._sending.pop(rank).slot)
            now = time.monotonic()
            self._refused[rank] = self._refused.get(rank, (now, now))[0], now
            self._full[rank] = 1
        elif kind == "accepted":
            self._refused.pop(rank, None)
            self._full[rank] = 0
            taken = self._sending[rank]
            for piece in self._boxes[rank].pieces(taken.slot, taken.nbytes):
                self.context.send_piece(source, piece)
        else:
            self._boxes[rank].free(self._sending.pop(rank).slot)

    def _note_more(self, rank: int, source: int, more: bool) -> None:
        machines = self._more[rank]
        machines.add(source) if more else machines.discard(source)
        self._full[rank] = bool(machines)

    def _consider(
        self, source: int, rank: int, sender: int, tag: int, head: int, nbytes: int, more: bool
    ) -> None:
        box = Mailbox(self.named_memory, box_of(rank))
        slot = box.reserve(nbytes, head, sender, tag)
        if slot is None:
            self._note_more(rank, source, True)
            self.send(source, "full", rank)
            return
        self._expected[source].append(_Expected(box, rank, slot, nbytes, more))
        self.send(source, "accepted", rank)

    def _receive(self, source: int) -> bool:
        expected = self._expected[source]
        received = self.context.receive_piece(source) if expected else None
        if received is None:
            return False
        if expected[0].add(received):
            rank, more = expected[0].rank, expected.popleft().more
            self._note_more(rank, source, more)
            self._bells[rank].post()
            self.send(source, "arrived", rank)
        return True


# Questions to the controller, which is a process on the first machine


_HOME = 0  # the machine of the master, the controller and the centers


class RelayedQuestions(RelayPart):
    """Passes on questions of this machine's ranks, or answers of the controller on this machine.

    On other machines than the controller's, the progress process stands in for it: it holds the lock
    that shows the ranks that the controller is alive, passes on the questions, and writes the answers.
    """

    name = "questions"

    def __init__(self, context: RelayContext) -> None:
        super().__init__(context)
        self._is_home = context.machine == _HOME
        memory = ControllerMemory(self.named_memory, context.size)
        self._state, self._alive = memory.state, memory.alive
        ranks = [rank for rank in range(context.size) if (rank in context.own) != self._is_home]
        self._channels = memory.channels(ranks)
        self._told = 0, False  # the state, and whether the controller is alive, as last sent

    def look(self) -> bool:
        changed = self._tell() if self._is_home else False
        for rank, channel in self._channels.items():
            complete = (channel.answer if self._is_home else channel.question).read_new()
            if complete is not None:
                to = self.context.machine_of(rank) if self._is_home else _HOME
                self.send(to, rank, *complete)
                changed = True
        return changed

    def _tell(self) -> bool:
        """Tell the other machines when the controller has started, and when it has died."""
        state = int(self._state[0])
        now = state, state == READY and not self._alive.is_free()
        if now == self._told:
            return False
        self._told = now
        self.send_to_others(None, *now)
        return True

    def take(self, source: int, rank: int | None, *content: Any) -> None:
        if rank is None:
            self._set_alive(*content)
            return
        channel = self._channels[rank]
        if self._is_home:
            channel.put(*content)
            return
        try:
            channel.reply(*content)
        except MemoryError as error:
            channel.reply(content[0], pickle.dumps((None, str(error))))

    def _set_alive(self, state: int, is_alive: bool) -> None:
        if is_alive:
            self._alive.try_acquire()
        elif not self._alive.is_free():
            self._alive.release()
        self._state[0] = state


# The stripes of a center


class _Refused(Exception):
    """A center cannot be opened; the arguments are the answer to the rank."""


class _RemoteRank:
    """A rank of another machine, and the stripe that it has entered."""

    def __init__(self, named_memory: NamedMemory, restarts: int) -> None:
        self.restarts = restarts
        self._named_memory = named_memory
        self._stripes: dict[str, Stripes] = {}
        self._fillings: dict[str, dict[int, np.ndarray]] = {}  # for centers that do not exist yet
        self._entered: tuple[Stripes, int] | None = None

    def do(self, kind: str, name: str, arguments: Any, data: Any) -> tuple[Any, np.ndarray | None]:
        """Return the answer and the memory to send, if any."""
        if kind == "open":
            return self._open(name, *arguments), None
        if kind == "fill":
            self._fillings.setdefault(name, {})[arguments[0]] = data
            return None, None
        stripes = self._stripes[name]
        if kind == "hold":
            return stripes.try_hold(), None
        if kind == "let go":
            stripes.let_go()
            return None, None
        return self._visit(stripes, *arguments, data)  # type: ignore[call-arg]  # three

    def _open(self, name: str, layout: bytes, count: int, nbytes: int) -> tuple[str, Any]:
        filling = self._fillings.get(name)

        def check(there: bytes) -> None:
            if there != layout:
                raise _Refused("other", there)

        def fill(number: int, memory: np.ndarray) -> None:
            if filling is None:
                raise _Refused("absent", None)
            memory[...] = filling[number]

        def refuse_to_wait() -> None:
            raise _Refused("busy", None)

        arguments = name, layout, check, count, nbytes, fill, refuse_to_wait
        try:
            stripes = self._stripes[name] = Stripes(self._named_memory, *arguments)
        except _Refused as refused:
            if refused.args[0] != "busy":
                self._fillings.pop(name, None)
            return refused.args
        self._fillings.pop(name, None)
        return "opened", stripes.member

    def _visit(
        self,
        stripes: Stripes,
        stored: int | None,
        number: int | None,
        changes: bool,
        data: np.ndarray | None,
    ) -> tuple[bool, np.ndarray | None]:
        if stored is not None:
            stripes.spare[...] = data
            stripes.replace(stored)
        self.leave()
        memory = None if number is None else stripes.enter(number)
        if memory is None:
            return False, None
        self._entered = stripes, number  # type: ignore[assignment]  # not None
        if not changes:
            memory = memory.copy()
            self.leave()
        return True, memory

    def leave(self) -> None:
        """Give back the lock of the stripe that it has entered."""
        entered, self._entered = self._entered, None
        if entered is not None:
            stripes, number = entered
            stripes.leave(number)

    def close(self) -> None:
        self.leave()
        for stripes in self._stripes.values():
            stripes.let_go()
            stripes.resign()


class RelayedStripes(RelayPart):
    """Passes on requests of this machine's ranks, or serves requests of other machines."""

    name = "stripes"

    def __init__(self, context: RelayContext) -> None:
        super().__init__(context)
        self._ranks: dict[int, _RemoteRank] = {}
        ranks = [] if context.machine == _HOME else context.own
        self._channels = {rank: StripeChannel(self.named_memory, rank) for rank in ranks}
        self._asked = {rank: (0, Request(0, "", "", (), 0, False)) for rank in ranks}

    def look(self) -> bool:
        changed = False
        for rank, channel in self._channels.items():
            complete = channel.question.read_new()
            if complete is not None:
                self._send(rank, channel, *complete)
                changed = True
        return changed

    def _send(self, rank: int, channel: StripeChannel, number: int, pickled: bytes) -> None:
        request = Request(*pickle.loads(pickled))
        self._asked[rank] = number, request
        data = channel.memories(request.restarts, request.nbytes)[0] if request.has_data else None
        content = request.restarts, request.kind, request.name, request.arguments
        self.send(_HOME, rank, number, content, data)

    def take(self, source: int, rank: int, number: int, content: Any, data: np.ndarray | None) -> None:
        if self.context.machine == _HOME:
            restarts, kind, name, arguments = content
            self.drop(rank, before=restarts)
            rank_there = self._ranks.setdefault(rank, _RemoteRank(self.named_memory, restarts))
            answer, memory = rank_there.do(kind, name, arguments, data)
            self.send(source, rank, number, answer, memory)
            return
        asked, request = self._asked[rank]
        if asked == number:
            channel = self._channels[rank]
            if data is not None:
                channel.memories(request.restarts, request.nbytes)[1][...] = data
            channel.reply(number, pickle.dumps(content))

    def drop(self, rank: int, before: float = np.inf) -> None:
        """Forget the requests of a rank before its latest restart."""
        if rank in self._ranks and self._ranks[rank].restarts < before:
            self._ranks.pop(rank).close()

    def close(self) -> None:
        """Give back all locks."""
        for rank in list(self._ranks):
            self.drop(rank)


# Numbers and reports


_REPORTS = "reports"
_REPORT_INTERVAL = 0.01  # seconds between two checks for reports


class MirroredNumbers(RelayPart):
    """Sends the numbers of this machine's ranks to the other machines when they have changed.

    They are sent after the ranks' messages have arrived. So a rank that sees a clock has received the
    messages that were sent before it, also if it did not wait for a rank that has ended.

    Parameters
    ----------
    context : RelayContext
        The objects with which the relay works.
    messages : RelayedMessages
        The messages, which have to arrive before the numbers.
    stripes : RelayedStripes
        Notified of ranks that have ended or were replaced.
    """

    name = "numbers"

    def __init__(
        self, context: RelayContext, messages: RelayedMessages, stripes: RelayedStripes
    ) -> None:
        super().__init__(context)
        self._messages, self._stripes = messages, stripes
        self._arrays = {
            name: self.named_memory.array(name, (context.size,), "int64") for name in NUMBERS
        }
        self._sent = {name: [0] * len(context.own) for name in NUMBERS}
        self._reports = LatestReports(self.named_memory)
        self._reported = [0] * len(context.own)
        self._next = 0.0

    def look(self) -> bool:
        own = self.context.own
        changed = False
        for name, array in self._arrays.items():
            numbers = array[own.start : own.stop].tolist()
            if numbers != self._sent[name] and self._messages.have_arrived():
                self._sent[name] = numbers
                self.send_to_others(name, numbers)
                changed = True
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REPORT_INTERVAL
            changed = self._look_for_reports() or changed
        return changed

    def _look_for_reports(self) -> bool:
        found = []
        for index, rank in enumerate(self.context.own):
            number, text = self._reports.read(rank)
            if number > self._reported[index]:
                self._reported[index] = number
                found.append((rank, number, text))
        if found:
            self.send_to_others(_REPORTS, found)
        return bool(found)

    def take(self, source: int, name: str, content: Any) -> None:
        if name == _REPORTS:
            for report in content:
                self._reports.write(*report)
            return
        ranks = self.context.machines[source]
        self._arrays[name][ranks.start : ranks.stop] = content
        for rank, number in zip(ranks, content):
            if name == RESTARTS:
                self._stripes.drop(rank, before=number)
            elif name == ENDED and number:
                self._stripes.drop(rank)


# The work


#: A message of the progress process of the master's machine: the program has ended on all ranks
_OVER = "over"


class Relay:
    """The work of the progress process of a machine during a program. It is a `Work`.

    Parameters
    ----------
    machines : list of range
        The ranks of each machine.
    """

    def __init__(self, machines: Sequence[range]) -> None:
        self._machines = machines

    def run(self, work: WorkContext) -> None:
        context = RelayContext(work, self._machines)
        messages, stripes = RelayedMessages(context), RelayedStripes(context)
        numbers = MirroredNumbers(context, messages, stripes)
        parts: list[RelayPart] = [messages, RelayedQuestions(context), stripes, numbers]
        by_name = {part.name: part for part in parts}
        active = time.monotonic()
        try:
            while not work.is_over():
                is_active = False
                while (received := context.receive()) is not None:
                    source, name, content = received
                    if name == _OVER:
                        return
                    by_name[name].take(source, *content)
                    is_active = True
                for part in parts:
                    is_active = part.look() or is_active
                if is_active:
                    active = time.monotonic()
                # Looking takes 80 to 250 microseconds, about 1% of a core where there is nothing to do.
                work.wait(nap_after(time.monotonic() - active, LONGEST_IDLE_NAP))
        finally:
            stripes.close()
            if context.machine == _HOME:  # its leader knows when all ranks have ended
                for machine in context.others:
                    context.send(machine, _OVER)
            context.discard()  # messages that are no longer needed
