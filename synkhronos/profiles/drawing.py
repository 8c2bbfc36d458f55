"""Drawing a profile by matplotlib: a timeline of some steps, and bars of ranks and operations."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos.profiles.log import CATEGORIES, COMMAND, Event
from synkhronos.profiles.operations import Operation, by_function, shortened
from synkhronos.profiles.trace import find_waits

#: The color of each category
COLORS = dict(zip(CATEGORIES, ("#1f6fb4", "#8fbfe3", "#2e8b57", "#8e6bb0", "#e8862e", "#c9ccd1")))
_STEPS = 5  # that are drawn by default
_MOST = 2000  # events of a rank that are drawn
_NARROW = 0.78  # of the timeline's width: beside it are the shares of waiting
_FAST, _OWN, _OTHERS = "#2e8b57", "#8a8f98", "#d9dbde"
_LEAST_SHARE = 0.02  # of the time of all functions, for a function to be drawn
_ROOM = 1.28  # to the right of the longest bar, for its text


class Timeline(NamedTuple):
    """A part of a profile that is drawn.

    Attributes
    ----------
    title : str
        Which steps they are.
    seconds : float
        The length of the part.
    spans : list of list of (float, float, str)
        For each rank, the start, the length and the category of intervals. An interval hides what is
        below it, which is any interval before it.
    notes : list of str
        For each rank, the share of its time in all steps in which it waits, and for whom.
    """

    title: str
    seconds: float
    spans: list[list[tuple[float, float, str]]]
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
    middle = max((count - _STEPS) // 2, 0)
    chosen = range(count)[slice(middle, middle + _STEPS) if steps is None else steps]
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


def _span(event: Event, begin: float, end: float) -> tuple[float, float, str]:
    category = "other" if event.category == COMMAND else event.category
    return event.start - begin, min(event.start + event.seconds, end) - event.start, category


def _notes(events: Sequence[Sequence[Event]], waiting: Sequence[float]) -> list[str]:
    size = len(events)
    seconds = np.zeros((size, size))
    for wait in find_waits(events):
        seconds[wait.rank, wait.late] += wait.seconds
    return [
        f"waits {share:.0%}" + (f", for rank {own.argmax()}" if own.any() and share >= 0.005 else "")
        for share, own in zip(waiting, seconds)
    ]


# Figures


def make_figure(
    seconds: np.ndarray,
    ranks: Sequence[str],
    operations: Sequence[Operation],
    most: int,
    timeline: Timeline | None = None,
) -> Any:
    """Return a figure: a timeline, a bar for each rank, and bars for operations, if there are any.

    Parameters
    ----------
    seconds : numpy.ndarray
        Of shape ``(steps, ranks, categories)``.
    ranks : list of str
        The names of the ranks.
    operations : list of Operation
        Functions that take little time are left out.
    most : int
        How many operations of each function are drawn; another bar is the sum of the others.
    timeline : Timeline, optional
        The timeline, in which an interval has the color of its category.
    """
    from matplotlib.figure import Figure

    least = _LEAST_SHARE * sum(operation.seconds for operation in operations)
    functions = [
        (function, own)
        for function, own in by_function(operations, most).items()
        if sum(span.seconds for span in own) >= least
    ]
    bars = [1.3 * len(ranks), *(len(every) for _, every in functions)]
    if timeline is not None:
        bars.insert(0, bars[0])
    heights = [count + 2 for count in bars]
    figure = Figure(figsize=(10, 0.27 * sum(heights) + 0.3), layout="constrained")
    panels = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    top = panels[0]
    if timeline is not None:
        _draw_timeline(panels.pop(0), timeline, ranks)
    _draw_ranks(panels[0], 1e3 * seconds, ranks)
    _explain(top, COLORS)
    for axes, (function, every) in zip(panels[1:], functions):
        _draw_operations(axes, function, every)
    if functions:
        named = {"fast kernel": _FAST, "the compiler's own": _OWN, "the others": _OTHERS}
        _explain(panels[1], named)
    panels[-1].set_xlabel("ms per step", fontsize=9)
    return figure


def draw_timeline(timeline: Timeline, ranks: Sequence[str]) -> Any:
    """Return a figure with a timeline alone; see `make_figure`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.35 * len(ranks) + 0.9), layout="constrained")
    axes = figure.subplots()
    _draw_timeline(axes, timeline, ranks)
    _explain(axes, COLORS)
    return figure


def _draw_timeline(axes: Any, timeline: Timeline, ranks: Sequence[str]) -> None:
    places, whole = np.arange(len(ranks))[::-1], 1e3 * timeline.seconds
    for place, spans, note in zip(places, timeline.spans, timeline.notes):
        intervals = [(1e3 * start, 1e3 * seconds) for start, seconds, _ in spans]
        shades = [COLORS[category] for *_, category in spans]
        axes.broken_barh(intervals, (place - 0.35, 0.7), facecolors=shades, linewidth=0)
        _write(axes, note, whole, place)
    _finish(axes, timeline.title, ranks, np.array([whole]))
    axes.set_xlim(0, whole / _NARROW)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= whole])
    axes.set_xlabel("ms", fontsize=9)


def _draw_ranks(axes: Any, milliseconds: np.ndarray, ranks: Sequence[str]) -> None:
    steps = len(milliseconds)
    each = milliseconds.sum(axis=0) / max(steps, 1)
    places, begin = np.arange(len(ranks))[::-1], np.zeros(len(ranks))
    for own, colour in zip(each.T, COLORS.values()):
        axes.barh(places, own, 0.7, left=begin, color=colour)
        begin = begin + own
    for place, end in zip(places, begin):
        _write(axes, f"{_number(end)} ms", end, place)
    title = "A step" if steps == 1 else f"A step, mean of {steps}"
    _finish(axes, title, ranks, begin)


def _draw_operations(axes: Any, function: str, every: Sequence[Operation]) -> None:
    milliseconds = np.array([1e3 * span.seconds for span in every])
    places = np.arange(len(every))[::-1]
    colours = [{"fast": _FAST, "": _OTHERS}.get(item.kernel, _OWN) for item in every]
    axes.barh(places, milliseconds, 0.7, color=colours)
    for place, item, value in zip(places, every, milliseconds):
        _write(axes, f"{_number(value)} ms, {item.share:.0%}", value, place)
    title = f"{function}: {_number(milliseconds.sum())} ms, mean of the ranks"
    _finish(axes, title, map(_label, every), milliseconds)


def _label(operation: Operation) -> str:
    if not operation.kernel:
        return f"{operation.name}, {operation.nodes} nodes"
    name = shortened(operation.name).replace("$", r"\$")
    return f"{name} × {operation.nodes}" if operation.nodes > 1 else name


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def _write(axes: Any, text: str, end: float, place: float) -> None:
    shift = {"xytext": (4, 0), "textcoords": "offset points"}
    axes.annotate(text, (end, place), **shift, va="center", fontsize=8)


def _finish(axes: Any, title: str, labels: Iterable[str], ends: np.ndarray) -> None:
    labels = list(labels)
    axes.set_yticks(np.arange(len(labels))[::-1], labels, fontsize=8)
    axes.set_ylim(-0.7, len(labels) - 0.3)
    axes.set_xlim(0, _ROOM * max(*ends, 1e-6))
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e3e3e3")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _explain(axes: Any, colours: Mapping[str, str]) -> None:
    """Write the meaning of colours above the axes, at the right."""
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours.items()],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=0.3,
        ncols=len(colours),
        frameon=False,
        fontsize=8,
        handlelength=1,
        columnspacing=1.2,
    )
