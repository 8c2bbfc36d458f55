"""Tests of the count of usable cores, by control groups of plain files, and of their other users."""

import logging
import weakref

import pytest

from synkhronos.host import machine as machine_load
from synkhronos.host.doctor import checks
from synkhronos.host.doctor.check import OK, WARNING
from synkhronos.host.machine import OtherPrograms, affinity, control_groups, cores, cpu_quota
from synkhronos.world import launch


@pytest.fixture
def machine(tmp_path):
    """Function that creates fake proc and cgroup mounts, the latter from ``{path: text}``."""

    def make(cgroup_of_process, files):
        proc = tmp_path / "proc"
        (proc / "self").mkdir(parents=True)
        (proc / "self" / "cgroup").write_text(cgroup_of_process)
        cgroups = tmp_path / "cgroup"
        cgroups.mkdir()
        for name, text in files.items():
            path = cgroups / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return proc, cgroups

    return make


def test_without_control_groups_the_affinity_mask_decides(tmp_path):
    assert cores(tmp_path / "none", tmp_path / "none") == affinity()


QUOTAS = {
    "version 2": ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 1.5),
    "version 2 without a limit": ("0::/a\n", {"a/cpu.max": "max 100000\n"}, None),
    "the tightest level": (
        "0::/a/b\n", {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "400000 100000\n"}, 1.0,
    ),
    "a container's, at the mount": ("0::/outside/of/it\n", {"cpu.max": "300000 100000\n"}, 3.0),
    "version 1": (
        "3:cpuacct:/job\n1:cpu,x:/job\n0::/\n",
        {"cpu/job/cpu.cfs_quota_us": "200000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 2.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("of_process, files, quota", QUOTAS.values(), ids=QUOTAS)
def test_the_quota_is_read(machine, of_process, files, quota):
    assert cpu_quota(*machine(of_process, files)) == quota


def test_less_than_a_core_still_counts_as_one(machine):
    assert cores(*machine("0::/\n", {"cpu.max": "50000 100000\n"})) == 1


def test_a_path_that_climbs_out_of_the_mount_does_no_harm(machine):
    proc, cgroups = machine("0::/../../elsewhere\n", {"cpu.max": "100000 100000\n"})
    assert cgroups in control_groups("cpu", proc, cgroups)


@pytest.mark.parametrize("busy, own, used", [(3.0, 1.0, 1.0), (3.0, 3.5, 0.0), (1e6, 0, affinity())])
def test_the_others_have_used_what_is_not_its_own(monkeypatch, busy, own, used):
    times = iter([(0.0, 100.0, 10.0), (2.0, 100.0 + busy, 10.0 + own)])
    now = [*next(times)]
    monkeypatch.setattr(machine_load.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(machine_load, "_busy", lambda: now[1])
    monkeypatch.setattr(machine_load, "_own", lambda: now[2])
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
