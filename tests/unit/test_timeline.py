"""Tests of what pictures and traces of a profile show: who waits for whom, timelines, operations."""

import base64
import json
import re

import numpy as np
import pytest

import synkhronos as synk
from synkhronos.profiles.drawing import draw_timeline, make_timeline
from synkhronos.profiles.log import Event, OfRank, Timed
from synkhronos.profiles.trace import find_waits, make_trace


def step_of(rank, step, begin, work, wait):
    """Return the events of a rank in a step: it computes, and waits at a barrier."""
    met = begin + work
    end = "collect" if rank == 0 else None
    events = [Event(step, "compute", "gradient", begin, work), Event(step, "wait", "barrier", met, wait)]
    if end:
        events.append(Event(step, "wait", end, met + wait, 1.0))
    return [*events, Event(step, "command", "run", begin, work + wait + (1.0 if end else 0.5))]


def two_ranks(steps=1):
    """Rank 0 computes for two seconds and waits for rank 1, which computes for five."""
    return [
        [one for step in range(steps) for one in step_of(0, step, 10.0 * step, 2.0, 3.0)],
        [one for step in range(steps) for one in step_of(1, step, 10.0 * step, 5.0, 0.1)],
    ]


def test_the_rank_that_comes_last_is_waited_for():
    first, second = find_waits(two_ranks())
    assert (first.rank, first.late, first.event.name, first.seconds) == (0, 1, "barrier", 3.0)
    assert (first.cause.name, first.cause.start) == ("barrier", 5.0)
    # The master waits for the end of the worker's command.
    assert (second.rank, second.late, second.event.name) == (0, 1, "collect")
    assert second.cause.category == "command" and second.seconds == pytest.approx(0.6)


def test_a_timeline_shows_the_steps_in_the_middle():
    timeline = make_timeline(two_ranks(9), [0.6, 0.01], None)
    assert timeline.title == "Timeline: steps 2 to 6 of 9"
    assert timeline.seconds == 46.0 and [len(spans) for spans in timeline.spans] == [20, 15]
    whole, compute = timeline.spans[0][:2]  # the whole command is below what is inside it
    assert whole == (0.0, 6.0, "other") and compute == (0.0, 2.0, "compute")
    assert timeline.notes == ["waits 60%, for rank 1", "waits 1%"]


@pytest.mark.parametrize(
    ("steps", "title"),
    [(slice(0, 2), "steps 0 to 1 of 9"), (slice(-1, None), "step 8 of 9"), (slice(20, 30), None)],
)
def test_the_steps_of_a_timeline_can_be_chosen(steps, title):
    timeline = make_timeline(two_ranks(9), [0.0, 0.0], steps)
    assert timeline is None if title is None else timeline.title == f"Timeline: {title}"


def test_nothing_measured_has_no_timeline():
    assert make_timeline([[], []], [0.0, 0.0], None) is None
    assert "<img" not in synk.Profile()._repr_html_()


def test_arrows_of_a_trace_end_inside_the_waits():
    events = two_ranks()
    trace = make_trace(events, ["rank 0", "rank 1"], [])["traceEvents"]
    arrows = [one for one in trace if one["ph"] in "sf"]
    assert [(one["ph"], one["id"], one["pid"]) for one in arrows] == [
        ("s", 0, 1), ("f", 0, 0), ("s", 1, 1), ("f", 1, 0)
    ]  # fmt: skip
    for start, end in zip(arrows[::2], arrows[1::2]):
        assert start["name"] == end["name"] == "rank 0 waits for rank 1"
        assert start["ts"] <= end["ts"]
    for one in arrows:
        inside = [
            each for each in trace
            if each["ph"] == "X" and each["pid"] == one["pid"]
            and each["ts"] <= one["ts"] < each["ts"] + each["dur"]
        ]  # fmt: skip
        assert inside


def test_operations_are_inside_the_call_of_their_function():
    events = two_ranks()
    timed = Timed("gradient", [], ["Dot22", "Sum{0}", "Elemwise"])
    times = [(0, 0, np.array([1.5, 1e-9, 0.25], "float32"))]
    measured = [OfRank([], [timed], times, 0, ""), OfRank([], [], [], 0, "")]
    trace = make_trace(events, ["rank 0", "rank 1"], measured)["traceEvents"]
    found = [one for one in trace if one.get("cat") == "operation"]
    assert [(one["name"], one["pid"], one["ts"], one["dur"]) for one in found] == [
        ("Dot22", 0, 0.0, 1.5e6), ("Elemwise", 0, pytest.approx(1.5e6), 0.25e6)
    ]  # fmt: skip
    json.dumps(trace)


def measured():
    profile = synk.Profile()
    profile._take(two_ranks(3))
    return profile


def test_a_notebook_shows_the_timeline_above_the_table():
    pytest.importorskip("matplotlib")
    html = measured()._repr_html_()
    picture = re.match(r'<img alt="(.*?)" src="data:image/svg\+xml;base64,(.*?)" />', html)
    assert picture.group(1) == "Timeline: steps 0 to 2 of 3"
    assert b"</svg>" in base64.b64decode(picture.group(2))
    assert html.index("<table>") > picture.end()


def test_the_picture_has_the_timeline_and_the_shares_of_waiting(tmp_path):
    pytest.importorskip("matplotlib")
    profile = measured()
    figure = draw_timeline(profile._timeline(None), ["rank 0", "rank 1"])
    [axes] = figure.axes
    assert {text.get_text() for text in axes.texts} == {"waits 67%, for rank 1", "waits 2%"}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(profile.categories)
    profile.plot(tmp_path / "all.png", steps=slice(0, 1))
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(TypeError, match="steps: expected a slice, such as .*, got 3"):
        profile.plot(tmp_path / "none.png", steps=3)


def test_a_wait_for_a_batch_is_a_part_of_the_next_step():
    profile = synk.Profile()
    load, command = Event(0, "load", "batch 3", 0.0, 2.0), Event(0, "command", "run", 2.5, 1.0)
    profile._take([[load, command]])
    assert dict(zip(profile.categories, profile.seconds[0, 0].tolist())) == {
        "compute": 0.0, "copy": 0.0, "load": 2.0, "reduce": 0.0, "wait": 0.0, "other": 1.0
    }  # fmt: skip
