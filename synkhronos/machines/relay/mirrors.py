"""Numbers and reports of the ranks, of which each machine keeps a copy for all ranks."""

from __future__ import annotations

import time
from typing import Any

from synkhronos.machines.relay.messages import RelayedMessages
from synkhronos.machines.relay.part import RelayContext, RelayPart
from synkhronos.machines.relay.remote_stripes import RelayedStripes
from synkhronos.services.reports import ENDED, NUMBERS, RESTARTS, LatestReports

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
        self._reports = LatestReports(self.named_memory, context.size)
        self._reported = [0] * len(context.own)
        self._next = 0.0

    def look(self) -> bool:
        own = self.context.own
        changed = False
        for name, array in self._arrays.items():
            numbers = array[own.start : own.stop].tolist()
            if numbers != self._sent[name] and self._messages.have_arrived():
                self._sent[name] = numbers
                self._send(name, numbers)
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
            self._send(_REPORTS, found)
        return bool(found)

    def _send(self, name: str, content: Any) -> None:
        for machine in self.context.others:
            self.links.send(machine, self.name, name, content)

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
