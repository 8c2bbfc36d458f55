"""Visits to the stripes of centers on this machine, for ranks of other machines.

See `RemoteStripes`, which a rank of another machine uses.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from synkhronos.machines.relay.post import Part, Place
from synkhronos.machines.relay.remote_stripes import Counter, Request
from synkhronos.services.stripes import Stripes

_HOME = 0


class _Busy(Exception):
    """Another rank holds a lock."""


class _Absent(Exception):
    """There is no center of this name yet."""


class _Other(Exception):
    """The center has another layout, which is the argument."""


class _Visitor:
    """A rank of another machine, and the stripe that it has entered."""

    def __init__(self, commons, restarts):
        self.restarts = restarts
        self._commons = commons
        self._stripes: dict[str, Stripes] = {}
        self._fillings: dict[str, dict[int, np.ndarray]] = {}  # for centers that do not exist yet
        self._entered: tuple[Stripes, int] | None = None

    def do(self, kind, name, arguments, data):
        """Return the answer and the memory to send, if any."""
        if kind == "open":
            return self._open(name, *arguments), None
        if kind == "fill":
            self._fillings.setdefault(name, {})[arguments[0]] = data
            return None, None
        return self._visit(self._stripes[name], *arguments, data)

    def _open(self, name, layout, count, nbytes):
        filling = self._fillings.pop(name, None)

        def check(there):
            if there != layout:
                raise _Other(there)

        def fill(number, memory):
            if filling is None:
                raise _Absent
            memory[...] = filling[number]

        try:
            stripes = Stripes(self._commons, name, layout, check, count, nbytes, fill, _raise_busy)
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

    def _visit(self, stripes, stored, number, changes, data):
        if stored is not None:
            stripes.spare[...] = data
            stripes.replace(stored)
        self.leave()
        memory = None if number is None else stripes.enter(number)
        if memory is None:
            return False, None
        self._entered = stripes, number
        if not changes:
            memory = memory.copy()
            self.leave()
        return True, memory

    def leave(self):
        """Give back the lock of the stripe that it has entered."""
        entered, self._entered = self._entered, None
        if entered is not None:
            stripes, number = entered
            stripes.leave(number)

    def close(self):
        self.leave()
        for stripes in self._stripes.values():
            stripes.resign()


def _raise_busy():
    raise _Busy


class Visitors(Part):
    """Passes on requests of this machine's ranks, or serves requests of other machines."""

    name = "visitors"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._visitors: dict[int, _Visitor] = {}
        ranks = [] if place.machine == _HOME else place.own
        self._counters = {rank: Counter(self.commons, rank) for rank in ranks}
        self._asked = {rank: (0, Request(0, "", "", (), 0, False)) for rank in ranks}

    def look(self) -> bool:
        changed = False
        for rank, counter in self._counters.items():
            if counter.request.label()[0] == self._asked[rank][0]:
                continue
            complete = counter.request.read()
            if complete is not None:
                self._send(rank, counter, *complete)
                changed = True
        return changed

    def _send(self, rank, counter, number, request):
        request = Request(*pickle.loads(request))
        self._asked[rank] = number, request
        data = counter.memories(request.restarts, request.nbytes)[0] if request.has_data else None
        content = request.restarts, request.kind, request.name, request.arguments
        self.post.send(_HOME, self.name, rank, number, content, data)

    def take(self, source: int, rank: int, number: int, content: Any, data: np.ndarray | None) -> None:
        if self.place.machine == _HOME:
            restarts, *asked = content
            self.drop(rank, before=restarts)
            visitor = self._visitors.setdefault(rank, _Visitor(self.commons, restarts))
            answer, memory = visitor.do(*asked, data)
            self.post.send(source, self.name, rank, number, answer, memory)
            return
        asked, request = self._asked[rank]
        if asked == number:
            counter = self._counters[rank]
            if data is not None:
                counter.memories(request.restarts, request.nbytes)[1][...] = data
            counter.answer.write(number, pickle.dumps(content))
            counter.bell.post()

    def drop(self, rank: int, before: float = np.inf) -> None:
        """Forget what a rank was doing before its latest restart."""
        if rank in self._visitors and self._visitors[rank].restarts < before:
            self._visitors.pop(rank).close()

    def close(self) -> None:
        """Give back all locks."""
        for rank in list(self._visitors):
            self.drop(rank)
