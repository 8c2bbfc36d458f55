"""Tests of the arithmetic of clocks, and of a profile over machines whose clocks differ."""

import json
import time

import numpy as np
import pytest
from checks.machines import ThreadedMachines, start_world
from hypothesis import given, strategies as st
from test_engines import NaiveLab

import synkhronos as synk
from synkhronos.arithmetic.machines import Ping, read_clock, to_own

DELAYS = st.lists(st.tuples(*[st.floats(0, 0.01)] * 2), min_size=1, max_size=20)
SHIFTS, DRIFTS = st.floats(-1e6, 1e6), st.floats(-1e-3, 1e-3)


def pings(began, shift, drift, delays):
    """Return pings to a clock that shows ``shift + (1 + drift) * t`` at the time t."""
    made = []
    for there, back in delays:
        made.append(Ping(began, shift + (1 + drift) * (began + there), began + there + back))
        began += there + back
    return made


@given(SHIFTS, DRIFTS, DELAYS, DELAYS, st.floats(0.5, 1e4), st.floats(0, 1))
def test_times_are_wrong_by_the_error_of_the_readings_at_most(shift, drift, first, last, seconds, share):
    begin = read_clock(pings(10.0, shift, drift, first))
    end = read_clock(pings(10.5 + seconds, shift, drift, last))
    moment = begin.own + share * (end.own - begin.own)
    found = to_own(begin, end, shift + (1 + drift) * moment)
    rounding = 1e-9
    # The reading itself is of another moment than the ping's middle, for which the clock has drifted.
    assert abs(found - moment) <= 1.01 * max(begin.error, end.error) + rounding


def open_world(sizes, clocks):
    lab = NaiveLab()
    start_world(ThreadedMachines(sizes, 0, 60, clocks=clocks), lab.engine)
    x, w = lab.tensor("x", 1), lab.shared(np.zeros(9), "w")
    f = synk.function([x], (x.sum(), "sum"), updates=[(w, w + 1)])
    synk.distribute()

    def step():
        assert f(np.ones(8)) == 8
        synk.all_reduce(w)

    return step


@pytest.fixture
def close():
    yield
    synk.close()


def clock(shift, speed):
    return lambda: shift + speed * time.perf_counter()


CLOCKS = [time.perf_counter, clock(1e5, 1.0), clock(-3e4, 1.0 + 1e-4)]


@pytest.mark.parametrize("sizes", [[2, 2], [1, 1, 2]], ids=str)
def test_the_events_of_all_machines_are_on_the_clock_of_the_script(sizes, close, tmp_path):
    step = open_world(sizes, CLOCKS[: len(sizes)])
    began = time.perf_counter()
    with synk.profile(tmp_path / "trace.json") as profile:
        for _ in range(5):
            step()
            time.sleep(0.01)
    ended, error = time.perf_counter(), profile.clock_error
    assert 0 < error < ended - began
    master, *others = [[one for one in events if one.category == "command"] for events in profile.events]
    assert len(master) == 10 and len(others) == 3
    for commands in others:
        for own, around in zip(commands, master):
            assert own.step == around.step and own.start >= around.start - error
            assert own.start + own.seconds <= around.start + around.seconds + error
    spans = [one for one in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
             if one["ph"] == "X"]  # fmt: skip
    assert max(one["ts"] + one["dur"] for one in spans) <= 1e6 * (ended - began + 2 * error)


def test_the_trace_names_the_machine_of_each_rank(close, tmp_path, monkeypatch):
    step = open_world([1, 2], CLOCKS[:2])
    names = iter(["alone", "two", "two"])
    monkeypatch.setattr("synkhronos.profiles.log.socket.gethostname", lambda: next(names))
    with synk.profile(tmp_path / "trace.json") as profile:
        step()
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = [one["args"]["name"] for one in trace if one["ph"] == "M"]
    assert found == [f"rank {rank} on {host}" for rank, host in enumerate(profile.hosts)]
    assert sorted(profile.hosts) == ["alone", "two", "two"]
