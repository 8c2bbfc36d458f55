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

from synkhronos.services.channel import Channel
from synkhronos.services.stripes import order_of, visit_all
from synkhronos.services.wakeups import wakeup_semaphores
from synkhronos.stores.named_memory import NamedMemory

_AWAKE = 0.1  # seconds between two checks of a rank that waits


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
