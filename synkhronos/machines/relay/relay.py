"""The work of a courier while a program runs."""

from __future__ import annotations

import time

from synkhronos.machines.courier import Desk
from synkhronos.machines.relay.boxes import Boxes
from synkhronos.machines.relay.mirrors import Mirrors
from synkhronos.machines.relay.post import Part, Place, Post
from synkhronos.machines.relay.questions import Questions
from synkhronos.machines.relay.visitors import Visitors

# As a leader, a courier sleeps for a share of the time since it last had something to do. Looking for it
# takes 80 to 250 microseconds, so a courier that has nothing to do uses about 1% of a core.
_SHARE = 0.02
_SHORTEST_NAP = 2e-5  # seconds
_LONGEST_NAP = 2e-2


_FIRST = 0  # the machine of the master
_OVER = "over"  # a message of its courier


class _Over(Exception):
    """The program has ended on all ranks."""


class Relay:
    """What the courier of a machine does during a program. It is a `Work`.

    Parameters
    ----------
    machines : list of range
        The ranks of each machine.
    """

    def __init__(self, machines: list[range]) -> None:
        self._machines = machines

    def run(self, desk: Desk) -> None:
        post = Post(desk.links, desk.number)
        place = Place(desk.commons, post, desk.links.rank, self._machines)
        boxes, visitors = Boxes(place), Visitors(place)
        parts = [boxes, Questions(place), visitors, Mirrors(place, boxes, visitors)]
        by_name: dict[str, Part] = {part.name: part for part in parts}
        active = time.monotonic()
        try:
            while not desk.is_over():
                if self._turn(post, by_name):
                    active = time.monotonic()
                waited = time.monotonic() - active
                desk.wait(min(max(_SHARE * waited, _SHORTEST_NAP), _LONGEST_NAP))
        except _Over:
            pass
        finally:
            visitors.close()
            if place.machine == _FIRST:  # its leader knows when all ranks have ended
                for machine in place.others:
                    post.send(machine, _OVER)
            post.discard()  # what is no longer needed

    def _turn(self, post, parts):
        """Pass on what is new; return whether there was anything."""
        is_active = False
        while (received := post.receive()) is not None:
            source, name, content = received
            if name == _OVER:
                raise _Over
            parts[name].take(source, *content)
            is_active = True
        for part in parts.values():
            is_active = part.look() or is_active
        return is_active
