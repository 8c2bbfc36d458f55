"""The drawing of a profile, by matplotlib."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from synkhronos.profiles.categories import COLORS
from synkhronos.profiles.operations import Operation, by_function, shortened
from synkhronos.profiles.timeline import Timeline

_NARROW = 0.78  # of the timeline's width: beside it are the shares of waiting
_FAST, _OWN, _OTHERS = "#2e8b57", "#8a8f98", "#d9dbde"
_LEAST_SHARE = 0.02  # of the time of all functions, for a function to be drawn
_ROOM = 1.28  # to the right of the longest bar, for its text


def make_figure(
    seconds: np.ndarray,
    categories: Sequence[str],
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
    categories, ranks : list of str
        The names.
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
        bars.insert(0, 1.3 * len(ranks))
    heights = [count + 2 for count in bars]
    figure = Figure(figsize=(10, 0.27 * sum(heights) + 0.3), layout="constrained")
    panels = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    top = panels[0]
    if timeline is not None:
        _draw_timeline(panels.pop(0), timeline, dict(zip(categories, COLORS)), ranks)
    _draw_ranks(panels[0], 1e3 * seconds, categories, ranks)
    _explain(top, dict(zip(categories, COLORS)))
    for axes, (function, every) in zip(panels[1:], functions):
        _draw_operations(axes, function, every)
    if functions:
        named = {"fast kernel": _FAST, "the compiler's own": _OWN, "the others": _OTHERS}
        _explain(panels[1], named)
    panels[-1].set_xlabel("ms per step", fontsize=9)
    return figure


def draw_timeline(timeline: Timeline, categories: Sequence[str], ranks: Sequence[str]) -> Any:
    """Return a figure with a timeline alone; see `make_figure`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.35 * len(ranks) + 0.9), layout="constrained")
    axes, colours = figure.subplots(), dict(zip(categories, COLORS))
    _draw_timeline(axes, timeline, colours, ranks)
    _explain(axes, colours)
    return figure


def _draw_timeline(
    axes: Any, timeline: Timeline, colours: Mapping[str, str], ranks: Sequence[str]
) -> None:
    places, whole = np.arange(len(ranks))[::-1], 1e3 * timeline.seconds
    for place, spans, note in zip(places, timeline.spans, timeline.notes):
        intervals = [(1e3 * span.start, 1e3 * span.seconds) for span in spans]
        shades = [colours[span.category] for span in spans]
        axes.broken_barh(intervals, (place - 0.35, 0.7), facecolors=shades, linewidth=0)
        _write(axes, note, whole, place)
    _finish(axes, timeline.title, ranks, np.array([whole]))
    axes.set_xlim(0, whole / _NARROW)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= whole])
    axes.set_xlabel("ms", fontsize=9)


def _draw_ranks(
    axes: Any, milliseconds: np.ndarray, categories: Sequence[str], ranks: Sequence[str]
) -> None:
    steps = len(milliseconds)
    each = milliseconds.sum(axis=0) / max(steps, 1)
    places, begin = np.arange(len(ranks))[::-1], np.zeros(len(ranks))
    for own, colour in zip(each.T, COLORS):
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
