"""The stripes of a center on another machine, visited through the progress processes.

A rank writes its request to a channel, and the new contents of a stripe to memory beside it. The
progress process of its machine sends both to the progress process of the center's machine, which visits
the stripe for the rank and sends back its contents. While the rank computes, the progress process there
holds the lock of the stripe. The request that stores a stripe also takes the next one, so that there is
one round trip for each.
"""

from __future__ import annotations

import pickle
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from synkhronos.machines.relay.part import RelayContext, RelayPart
from synkhronos.services.channel import Channel
from synkhronos.services.stripes import Stripes, order_of, visit_all
from synkhronos.services.wakeups import wakeup_semaphores
from synkhronos.stores.named_memory import NamedMemory

_AWAKE = 0.1  # seconds between two checks of a rank that waits
_HOME = 0  # the machine of the centers


class Request(NamedTuple):
    """A request of a rank.

    Attributes
    ----------
    restarts : int
        How often the rank was replaced, to distinguish its requests from a dead rank's.
    kind : str
        ``"open"``, ``"fill"``, ``"visit"``, ``"hold"`` or ``"let go"``.
    name : str
        The name of the stripes.
    arguments : tuple
        The arguments of the request.
    nbytes : int
        The length of each of the two memories beside the channel; 0 for none.
    has_data : bool
        Whether the first one has data to send.
    """

    restarts: int
    kind: str
    name: str
    arguments: tuple[Any, ...]
    nbytes: int
    has_data: bool


class StripeChannel(Channel):
    """Where a rank and its progress process exchange requests, answers and contents of stripes.

    Parameters
    ----------
    named memory : Commons
        The named memory of the machine.
    rank : int
        The rank that asks.
    """

    def __init__(self, named_memory: NamedMemory, rank: int) -> None:
        self._named_memory, self._name = named_memory, f"stripes for rank {rank}"
        [bell] = wakeup_semaphores(named_memory, self._name, 1)
        super().__init__(named_memory, self._name, bell)

    def memories(self, restarts: int, nbytes: int) -> Sequence[np.ndarray]:
        """Return the memory for a rank's own contents, and the memory for contents that it receives."""
        name = f"{self._name}: {nbytes} bytes after {restarts} restarts"
        return list(self._named_memory.array(name, (2, nbytes), "uint8"))


class RemoteStripes:
    """Like `Stripes`, for a rank on another machine.

    Parameters
    ----------
    channel : StripeChannel
        The channel to the progress process.
    restarts : int
        How often the rank has died and was replaced.
    name, layout, check, count, nbytes, fill, pause
        As for `Stripes`.

    Attributes
    ----------
    is_first : bool
        Whether this rank has called `fill`, and the center has these contents.
    """

    def __init__(
        self,
        channel: StripeChannel,
        restarts: int,
        name: str,
        layout: bytes,
        check: Callable[[bytes], None],
        count: int,
        nbytes: int,
        fill: Callable[[int, np.ndarray], None],
        pause: Callable[[], None],
    ) -> None:
        self._channel, self._restarts, self._name, self._pause = channel, restarts, name, pause
        self._nbytes = nbytes
        self._sent, self._received = channel.memories(restarts, nbytes)
        answer = "busy"
        while True:
            answer, found = self._ask("open", layout, count, nbytes)
            if answer == "opened":
                break
            if answer == "other":
                check(found)
            elif answer == "absent":
                for number in range(count):
                    fill(number, self._sent)
                    self._ask("fill", number, has_data=True)
            pause()
        self.is_first, member = found
        self.order = order_of(member, count)

    def read(self, work: Callable[[int, np.ndarray], None]) -> None:
        """As `Stripes.read`."""
        self._visit(False, work)

    def change(self, work: Callable[[int, np.ndarray, np.ndarray], None]) -> None:
        """Like `Stripes.change`."""
        self._visit(True, lambda number, memory: work(number, memory, self._sent))

    def try_hold(self) -> bool:
        """As `Stripes.try_hold`."""
        return self._ask("hold")

    def let_go(self) -> None:
        """As `Stripes.let_go`."""
        self._ask("let go")

    def _visit(self, changes: bool, work: Callable[[int, np.ndarray], None]) -> None:
        changed = None  # the stripe that was entered and has to be replaced

        def visit(number: int) -> bool:
            nonlocal changed
            stored, changed = changed, None
            if not self._ask("visit", stored, number, changes, has_data=stored is not None):
                return False
            work(number, self._received)
            changed = number if changes else None
            return True

        try:
            visit_all(self.order, visit, self._pause)
        except Exception:
            changed = None
            self._ask("visit", None, None, changes)  # so that it leaves the stripe it has entered
            raise
        if changed is not None:
            self._ask("visit", changed, None, changes, has_data=True)

    def _ask(self, kind: str, *arguments: Any, has_data: bool = False) -> Any:
        request = Request(self._restarts, kind, self._name, arguments, self._nbytes, has_data)
        asked = pickle.dumps(tuple(request))
        return pickle.loads(self._channel.ask(asked, _AWAKE, self._pause))


class _Busy(Exception):
    """Another rank holds a lock."""


class _Absent(Exception):
    """There is no center of this name yet."""


class _Other(Exception):
    """The center has another layout, which is the argument."""


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
        filling = self._fillings.pop(name, None)

        def check(there: bytes) -> None:
            if there != layout:
                raise _Other(there)

        def fill(number: int, memory: np.ndarray) -> None:
            if filling is None:
                raise _Absent
            memory[...] = filling[number]

        try:
            stripes = Stripes(self._named_memory, name, layout, check, count, nbytes, fill, _raise_busy)
        except _Busy:
            if filling is not None:
                self._fillings[name] = filling
            return "busy", None
        except _Absent:
            return "absent", None
        except _Other as error:
            return "other", error.args[0]
        self._stripes[name] = stripes
        return "opened", (stripes.is_first, stripes.member)

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


def _raise_busy() -> None:
    raise _Busy


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
        self.links.send(_HOME, self.name, rank, number, content, data)

    def take(self, source: int, rank: int, number: int, content: Any, data: np.ndarray | None) -> None:
        if self.context.machine == _HOME:
            restarts, kind, name, arguments = content
            self.drop(rank, before=restarts)
            rank_there = self._ranks.setdefault(rank, _RemoteRank(self.named_memory, restarts))
            answer, memory = rank_there.do(kind, name, arguments, data)
            self.links.send(source, self.name, rank, number, answer, memory)
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
