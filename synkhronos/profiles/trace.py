"""A profile as a Chrome trace: the events of each rank, the operations in them, and arrows.

An arrow points from a rank that others wait for to the wait, which is found from the events of all
ranks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Iterator, NamedTuple, Sequence

from synkhronos.profiles.log import COMMAND, Event, OfRank
from synkhronos.profiles.operations import shortened

_SHORTEST = 1e-6  # seconds of a node in the trace
_INSIDE = 0.99  # of an event: where an arrow ends in it
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


def operations_in(events: Sequence[Event], measured: OfRank) -> Iterator[Event]:
    """Yield the operations inside the events of a rank.

    Only their durations are known, so each begins where the one before it has ended.
    """
    for index, function, seconds in measured.node_times:
        step, _, _, start, _ = events[index]
        for name, each in zip(measured.functions[function].nodes, seconds.tolist()):
            if each >= _SHORTEST:
                yield Event(step, "operation", name, start, each)
            start += each


def make_trace(
    events: Sequence[Sequence[Event]], labels: Sequence[str], measured: Sequence[OfRank]
) -> dict[str, Any]:
    """Return the trace, as an object to be written as JSON.

    Parameters
    ----------
    events : list of list of Event
        The events of each rank, by one clock.
    labels : list of str
        The name of each rank.
    measured : list of OfRank
        The measurements of each rank, with the operations; none if they were not timed.
    """
    begin = min((event.start for own in events for event in own), default=0)
    trace: list[dict[str, Any]] = []
    for rank, (own, label) in enumerate(zip(events, labels)):
        trace.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": label}})
        trace += [_slice(rank, event, begin) for event in own]
        for item in measured[rank : rank + 1]:
            trace += [_slice(rank, event, begin) for event in operations_in(own, item)]
    for number, wait in enumerate(find_waits(events)):
        trace += _arrow(number, wait, begin)
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def _slice(rank: int, event: Event, begin: float) -> dict[str, Any]:
    is_node = event.category == "operation"
    return {
        "name": shortened(event.name) if is_node else event.name,
        "cat": event.category,
        "ph": "X",
        "pid": rank,
        "tid": 0,
        "ts": 1e6 * (event.start - begin),
        "dur": 1e6 * event.seconds,
        "args": {"step": event.step, **({"operation": event.name} if is_node else {})},
    }


def _arrow(number: int, wait: Wait, begin: float) -> list[dict[str, Any]]:
    """Return the beginning and the end of an arrow from what is waited for to the end of the wait."""
    event, cause = wait.event, wait.cause
    end = event.start + _INSIDE * event.seconds
    arrives = cause.start if cause.name == event.name else cause.start + _INSIDE * cause.seconds
    ends = (wait.late, min(arrives, end), "s"), (wait.rank, end, "f")
    return [
        {
            "name": f"rank {wait.rank} waits for rank {wait.late}", "cat": "wait", "id": number,
            "ph": kind, "bp": "e", "pid": rank, "tid": 0, "ts": 1e6 * (time - begin),
        }
        for rank, time, kind in ends
    ]  # fmt: skip
