"""Which rank waits for which: computed from the events of all ranks."""

from __future__ import annotations

from collections import defaultdict
from typing import Iterator, NamedTuple, Sequence

from synkhronos.profiles.log import COMMAND, Event

_MEETING, _END = "barrier", "collect"  # the events in which ranks wait for others


class Wait(NamedTuple):
    """A wait of one rank for another one.

    Attributes
    ----------
    rank, late : int
        The rank that waits, and the rank that comes last.
    event, cause : Event
        The wait, and what the late rank does when it comes: its own event at the barrier, or its
        command, at the end of which the master waits for it.
    seconds : float
        How long the rank has waited for the late one to come.
    """

    rank: int
    late: int
    event: Event
    cause: Event
    seconds: float


def find_waits(events: Sequence[Sequence[Event]]) -> Iterator[Wait]:
    """Yield the waits of all ranks, given the events of each.

    All ranks meet at each barrier of a command, and the master waits for the end of each worker's
    command. Steps in which ranks have met in groups are left out.
    """
    meetings: defaultdict[int, list[list[Event]]] = defaultdict(lambda: [[] for _ in events])
    ends: defaultdict[int, dict[int, Event]] = defaultdict(dict)
    for rank, own in enumerate(events):
        for event in own:
            if event.name == _MEETING:
                meetings[event.step][rank].append(event)
            elif event.category == COMMAND:
                ends[event.step][rank] = event
    for by_rank in meetings.values():
        if len({len(own) for own in by_rank}) == 1:
            for together in zip(*by_rank):
                late = max(range(len(events)), key=lambda rank: together[rank].start)  # noqa: B023
                yield from _waits_for(late, together)
    for rank, own in enumerate(events):
        for event in own:
            others = {item: end for item, end in ends[event.step].items() if item != rank}
            if event.name == _END and others:
                late = max(others, key=lambda one: _stop(others[one]))  # noqa: B023
                seconds = min(_stop(others[late]), _stop(event)) - event.start
                if seconds > 0:
                    yield Wait(rank, late, event, others[late], seconds)


def _waits_for(late: int, together: Sequence[Event]) -> Iterator[Wait]:
    cause = together[late]
    for rank, event in enumerate(together):
        seconds = min(cause.start, _stop(event)) - event.start
        if rank != late and seconds > 0:
            yield Wait(rank, late, event, cause, seconds)


def _stop(event: Event) -> float:
    return event.start + event.seconds
