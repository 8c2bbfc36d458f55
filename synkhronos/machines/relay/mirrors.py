"""Numbers and reports of the ranks, of which each machine keeps a copy for all ranks."""

from __future__ import annotations

import time
from typing import Any

from synkhronos.machines.relay.boxes import Boxes
from synkhronos.machines.relay.post import Part, Place
from synkhronos.machines.relay.visitors import Visitors
from synkhronos.services import reports
from synkhronos.services.rank_numbers import ENDED, NAMES, RESTARTS

_REPORTS = "reports"
_REPORT_INTERVAL = 0.01  # seconds between two checks for reports


class Mirrors(Part):
    """Sends the numbers of this machine's ranks to the other machines when they have changed.

    They are sent after the ranks' messages have arrived. So a rank that sees a clock has received the
    messages that were sent before it, also if it did not wait for a rank that has ended.

    Parameters
    ----------
    place : Place
    boxes : Boxes
    visitors : Visitors
        Notified of ranks that have ended or were replaced.
    """

    name = "mirrors"

    def __init__(self, place: Place, boxes: Boxes, visitors: Visitors) -> None:
        super().__init__(place)
        self._boxes, self._visitors = boxes, visitors
        self._arrays = {name: self.commons.array(name, (place.size,), "int64") for name in NAMES}
        self._sent = {name: [0] * len(place.own) for name in NAMES}
        self._reports = reports.Places(self.commons, place.size)
        self._reported = [0] * len(place.own)
        self._next = 0.0

    def look(self) -> bool:
        own = self.place.own
        changed = False
        for name, array in self._arrays.items():
            numbers = array[own.start : own.stop].tolist()
            if numbers != self._sent[name] and self._boxes.are_empty():
                self._sent[name] = numbers
                self._send(name, numbers)
                changed = True
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REPORT_INTERVAL
            changed = self._look_for_reports() or changed
        return changed

    def _look_for_reports(self):
        found = []
        for index, rank in enumerate(self.place.own):
            number, text = self._reports.read(rank)
            if number > self._reported[index]:
                self._reported[index] = number
                found.append((rank, number, text))
        if found:
            self._send(_REPORTS, found)
        return bool(found)

    def _send(self, name, content):
        for machine in self.place.others:
            self.post.send(machine, self.name, name, content)

    def take(self, source: int, name: str, content: Any) -> None:
        if name == _REPORTS:
            for report in content:
                self._reports.write(*report)
            return
        ranks = self.place.machines[source]
        self._arrays[name][ranks.start : ranks.stop] = content
        for rank, number in zip(ranks, content):
            if name == RESTARTS:
                self._visitors.drop(rank, before=number)
            elif name == ENDED and number:
                self._visitors.drop(rank)
