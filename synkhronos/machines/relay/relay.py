"""The work of a progress process while a program runs."""

from __future__ import annotations

import time
from typing import Mapping, Sequence

from synkhronos.machines.progress_process import WorkContext
from synkhronos.machines.relay.messages import RelayedMessages
from synkhronos.machines.relay.mirrors import MirroredNumbers
from synkhronos.machines.relay.part import RelayContext, RelayLinks, RelayPart
from synkhronos.machines.relay.questions import RelayedQuestions
from synkhronos.machines.relay.remote_stripes import RelayedStripes

# As a leader, a progress process sleeps for a share of the time since it last had something to do.
# Looking for it takes 80 to 250 microseconds, so a progress process that has nothing to do uses about 1%
# of a core.
_SHARE = 0.02
_SHORTEST_NAP = 2e-5  # seconds
_LONGEST_NAP = 2e-2

_FIRST = 0  # the machine of the master
_OVER = "over"  # a message of its progress process


class _Over(Exception):
    """The program has ended on all ranks."""


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
        links = RelayLinks(work.links, work.number)
        context = RelayContext(work.named_memory, links, work.links.rank, self._machines)
        messages, stripes = RelayedMessages(context), RelayedStripes(context)
        numbers = MirroredNumbers(context, messages, stripes)
        parts = [messages, RelayedQuestions(context), stripes, numbers]
        by_name: dict[str, RelayPart] = {part.name: part for part in parts}
        active = time.monotonic()
        try:
            while not work.is_over():
                if self._turn(links, by_name):
                    active = time.monotonic()
                waited = time.monotonic() - active
                work.wait(min(max(_SHARE * waited, _SHORTEST_NAP), _LONGEST_NAP))
        except _Over:
            pass
        finally:
            stripes.close()
            if context.machine == _FIRST:  # its leader knows when all ranks have ended
                for machine in context.others:
                    links.send(machine, _OVER)
            links.discard()  # messages that are no longer needed

    def _turn(self, links: RelayLinks, parts: Mapping[str, RelayPart]) -> bool:
        """Pass on new messages and numbers; return whether there were any."""
        is_active = False
        while (received := links.receive()) is not None:
            source, name, content = received
            if name == _OVER:
                raise _Over
            parts[name].take(source, *content)
            is_active = True
        for part in parts.values():
            is_active = part.look() or is_active
        return is_active
