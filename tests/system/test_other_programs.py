"""Tests of what other programs use of the cores, and of what is said about it."""

import logging
import weakref

import pytest

from synkhronos.host import machine
from synkhronos.host.doctor import checks
from synkhronos.host.doctor.check import OK, WARNING
from synkhronos.host.machine import affinity
from synkhronos.host.machine import OtherPrograms
from synkhronos.world import launch


@pytest.mark.parametrize("busy, own, used", [(3.0, 1.0, 1.0), (3.0, 3.5, 0.0), (1e6, 0, affinity())])
def test_the_others_have_used_what_is_not_its_own(monkeypatch, busy, own, used):
    times = iter([(0.0, 100.0, 10.0), (2.0, 100.0 + busy, 10.0 + own)])
    now = [*next(times)]
    monkeypatch.setattr(machine.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(machine, "_busy", lambda: now[1])
    monkeypatch.setattr(machine, "_own", lambda: now[2])
    others = OtherPrograms()
    now[:] = next(times)
    assert others.seconds == 2 and others.cores() == pytest.approx(min(used, affinity()))
    assert others.own_cores() == own / 2


class Busy:
    """Other programs that use a number of cores."""

    def __init__(self, cores, seconds=100.0, own=2.0):
        self.seconds, self._cores, self._own = seconds, cores, own

    def cores(self):
        return self._cores

    def own_cores(self):
        return self._own


@pytest.mark.parametrize(
    "used, seconds, ranks, is_said",
    [
        (0.9, 100, 4, True),
        (0.4, 100, 4, False),  # half a core is not missed
        (0.9, 100, 3, False),  # a core was free
        (0.9, 30, 4, False),  # it was short
        (0.9, 100, 1, False),
        (0.9, 100, 5, False),  # more ranks than cores wait for each other anyway
    ],
)
def test_a_long_run_on_a_busy_machine_ends_with_a_remark(
    monkeypatch, caplog, used, seconds, ranks, is_said
):
    monkeypatch.setattr(launch, "affinity", lambda: 4)
    world = type("World", (), {"size": ranks})()
    with caplog.at_level(logging.WARNING, "synkhronos"):
        launch._remark_on_others(Busy(used, seconds), weakref.ref(world))
    said = [
        "other programs used 0.9 of 4 cores during this run, so its 4 ranks waited for each other; "
        "one rank less, fork(3), may be faster"
    ]
    assert [one.getMessage() for one in caplog.records] == said * is_said


@pytest.mark.parametrize(
    "used, state, remedy",
    [
        (0.2, OK, ""),
        (1.2, WARNING, "while they run, fork(3) may be faster, as ranks wait for each other"),
        (4.0, OK, ""),
    ],
)
def test_the_doctor_reports_the_load(monkeypatch, used, state, remedy):
    monkeypatch.setattr(checks, "OtherPrograms", lambda: Busy(used))
    monkeypatch.setattr(checks, "affinity", lambda: 4)
    monkeypatch.setattr(checks, "cores", lambda: 4)
    monkeypatch.setattr(checks.time, "sleep", lambda seconds: None)
    (check,) = [one for one in checks.CHECKS if one.name == "other load"]
    result = check.run()
    assert (result.state, result.remedy) == (state, remedy)
    assert result.found == f"other programs use {used:.1f} of 4 cores"
