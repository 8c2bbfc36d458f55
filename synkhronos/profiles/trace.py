"""A profile as a Chrome trace: the events of each rank, the operations in them, and arrows."""

from __future__ import annotations

from typing import Any, Iterator, Sequence

from synkhronos.profiles.log import Event, NodeTimes, Timed
from synkhronos.profiles.operations import shortened
from synkhronos.profiles.waits import Wait, find_waits

_SHORTEST = 1e-6  # seconds of a node in the trace
_INSIDE = 0.99  # of an event: where an arrow ends in it


class Nodes:
    """The times of single operations on a rank.

    Parameters
    ----------
    functions : list of Timed
        The functions whose operations were timed.
    node_times : list of tuple
        The fields of the `NodeTimes` of each call.
    """

    def __init__(self, functions: Sequence[Timed] = (), node_times: Sequence[Any] = ()) -> None:
        self._nodes = [function.nodes for function in functions]
        self._calls = [NodeTimes(*node_time) for node_time in node_times]

    def spans(self, events: Sequence[Event]) -> Iterator[Event]:
        """Yield the operations inside the events of the rank.

        Only their durations are known, so each begins where the one before it has ended.
        """
        for index, function, seconds in self._calls:
            step, _, _, start, _ = events[index]
            for name, each in zip(self._nodes[function], seconds.tolist()):
                if each >= _SHORTEST:
                    yield Event(step, "operation", name, start, each)
                start += each


def make_trace(
    events: Sequence[Sequence[Event]], labels: Sequence[str], nodes: Sequence[Nodes]
) -> dict[str, Any]:
    """Return the trace, as an object to be written as JSON.

    Parameters
    ----------
    events : list of list of Event
        The events of each rank.
    labels : list of str
        The name of each rank.
    nodes : list of Nodes
        The operations on each rank; none if they were not timed.
    """
    begin = min((event.start for own in events for event in own), default=0)
    trace: list[dict[str, Any]] = []
    for rank, (own, label) in enumerate(zip(events, labels)):
        trace.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": label}})
        trace += [_slice(rank, event, begin) for event in own]
        for node in nodes[rank : rank + 1]:
            trace += [_slice(rank, event, begin) for event in node.spans(own)]
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
