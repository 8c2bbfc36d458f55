"""The stripes of a center on another machine, visited through the couriers.

A rank writes its request to a register, and the new contents of a stripe to memory beside it. The
courier of its machine sends both to the courier of the center's machine (``relay/visitors``), which
visits the stripe for the rank and sends back its contents. While the rank computes, the courier there
holds the lock of the stripe. The request that stores a stripe also takes the next one, so that there is
one round trip for each.
"""

from __future__ import annotations

import pickle
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from synkhronos.services.register import Register
from synkhronos.services.stripes import order_of, visit_all
from synkhronos.services.wakeups import find_bells
from synkhronos.stores.commons import Commons

_AWAKE = 0.1  # seconds between two checks of a rank that waits


class Request(NamedTuple):
    """A request of a rank.

    Attributes
    ----------
    restarts : int
        How often the rank was replaced, to distinguish its requests from a dead rank's.
    kind : str
        ``"open"``, ``"fill"`` or ``"visit"``.
    name : str
        The name of the stripes.
    arguments : tuple
    nbytes : int
        The length of each of the two memories beside the register; 0 for none.
    has_data : bool
        Whether the first one has data to send.
    """

    restarts: int
    kind: str
    name: str
    arguments: tuple
    nbytes: int
    has_data: bool


class Counter:
    """Where a rank and the courier of its machine exchange requests and answers.

    Parameters
    ----------
    commons : Commons
    rank : int
    """

    def __init__(self, commons: Commons, rank: int) -> None:
        self._commons, self._name = commons, f"stripes for rank {rank}"
        self.request = Register(commons, f"{self._name}: request")
        self.answer = Register(commons, f"{self._name}: answer")
        [self.bell] = find_bells(commons, self._name, 1)

    def memories(self, restarts: int, nbytes: int) -> Sequence[np.ndarray]:
        """Return the memory for what a rank sends, and the memory for what it receives."""
        name = f"{self._name}: {nbytes} bytes after {restarts} restarts"
        return list(self._commons.array(name, (2, nbytes), "uint8"))


class RemoteStripes:
    """Like `Stripes`, for a rank on another machine.

    Parameters
    ----------
    counter : Counter
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
        counter: Counter,
        restarts: int,
        name: str,
        layout: bytes,
        check: Callable[[bytes], None],
        count: int,
        nbytes: int,
        fill: Callable[[int, np.ndarray], None],
        pause: Callable[[], None],
    ) -> None:
        self._counter, self._restarts, self._name, self._pause = counter, restarts, name, pause
        self._nbytes = nbytes
        self._sent, self._received = counter.memories(restarts, nbytes)
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

    def _visit(self, changes, work):
        changed = None  # the stripe that was entered and has to be replaced

        def visit(number):
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
            self._ask("visit", None, None, changes)  # so that it leaves what it has entered
            raise
        if changed is not None:
            self._ask("visit", changed, None, changes, has_data=True)

    def _ask(self, kind, *arguments, has_data=False) -> Any:
        counter = self._counter
        request = Request(self._restarts, kind, self._name, arguments, self._nbytes, has_data)
        number = counter.request.label()[0] + 1
        counter.bell.drain()
        counter.request.write(number, pickle.dumps(tuple(request)))
        while True:
            answer = counter.answer.read() if counter.answer.label()[0] == number else None
            if answer is not None:
                return pickle.loads(answer[1])
            if not counter.bell.wait(_AWAKE):
                self._pause()
