"""What a timeline of a profile shows: which steps, and the spans of each rank in them."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np

from synkhronos.profiles.log import COMMAND, Event
from synkhronos.profiles.waits import find_waits

_STEPS = 5  # that are drawn by default
_MOST = 2000  # events of a rank that are drawn


class Span(NamedTuple):
    """An interval of a rank: its start and length in seconds, and its category.

    A span hides what is below it, which is any span before it.
    """

    start: float
    seconds: float
    category: str


class Timeline(NamedTuple):
    """A part of a profile that is drawn.

    Attributes
    ----------
    title : str
        Which steps they are.
    seconds : float
        The length of the part.
    spans : list of list of Span
        For each rank, in the order in which they are drawn.
    notes : list of str
        For each rank, the share of its time in all steps in which it waits, and for whom.
    """

    title: str
    seconds: float
    spans: list[list[Span]]
    notes: list[str]


def make_timeline(
    events: Sequence[Sequence[Event]], waiting: Sequence[float], steps: slice | None
) -> Timeline | None:
    """Return the timeline of some steps; None if nothing was measured in them.

    Parameters
    ----------
    events : list of list of Event
        The events of each rank.
    waiting : list of float
        The share of waiting of each rank.
    steps : slice or None
        The steps to draw; by default five in the middle.
    """
    count = max((event.step + 1 for own in events for event in own), default=0)
    chosen = range(count)[_middle(count) if steps is None else steps]
    if not chosen:
        return None
    first, last = min(chosen), max(chosen)
    drawn = [[event for event in own if first <= event.step <= last] for own in events]
    if not any(drawn):
        return None
    begin = min(event.start for own in drawn for event in own)
    end = max(event.start + event.seconds for own in drawn for event in own)
    title = f"step {first}" if first == last else f"steps {first} to {last}"
    title = f"{title} of {count}"
    for own in drawn:
        own.sort(key=lambda event: (event.start, -event.seconds))
    crowded = [own[_MOST].start for own in drawn if len(own) > _MOST]
    if crowded:
        end = min(crowded)
        title = f"the first {1e3 * (end - begin):.3g} ms of {title}"
    spans = [[_span(event, begin, end) for event in own if event.start < end] for own in drawn]
    return Timeline(f"Timeline: {title}", end - begin, spans, _notes(events, waiting))


def _middle(count: int) -> slice:
    first = max((count - _STEPS) // 2, 0)
    return slice(first, first + _STEPS)


def _span(event: Event, begin: float, end: float) -> Span:
    category = "other" if event.category == COMMAND else event.category
    return Span(event.start - begin, min(event.start + event.seconds, end) - event.start, category)


def _notes(events: Sequence[Sequence[Event]], waiting: Sequence[float]) -> list[str]:
    size = len(events)
    seconds = np.zeros((size, size))
    for wait in find_waits(events):
        seconds[wait.rank, wait.late] += wait.seconds
    return [
        f"waits {share:.0%}" + (f", for rank {own.argmax()}" if own.any() and share >= 0.005 else "")
        for share, own in zip(waiting, seconds)
    ]
