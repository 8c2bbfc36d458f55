"""Tests of the count of usable cores, with control groups simulated by plain files."""

import pytest

from synkhronos.host.machine import affinity, control_groups, cores, cpu_quota


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


def test_version_2_quota_is_read(machine):
    assert cpu_quota(*machine("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"})) == 1.5


def test_version_2_without_a_limit_is_no_quota(machine):
    assert cpu_quota(*machine("0::/a\n", {"a/cpu.max": "max 100000\n"})) is None


def test_the_tightest_level_counts(machine):
    files = {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "400000 100000\n"}
    assert cpu_quota(*machine("0::/a/b\n", files)) == 1.0


def test_a_container_sees_its_limit_at_the_mount(machine):
    files = {"cpu.max": "300000 100000\n"}
    assert cpu_quota(*machine("0::/outside/of/the/mount\n", files)) == 3.0


def test_version_1_quota_is_read(machine):
    files = {"cpu/job/cpu.cfs_quota_us": "200000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}
    assert cpu_quota(*machine("3:cpuacct:/job\n1:cpu,x:/job\n0::/\n", files)) == 2.0


def test_less_than_a_core_still_counts_as_one(machine):
    assert cores(*machine("0::/\n", {"cpu.max": "50000 100000\n"})) == 1


def test_a_path_that_climbs_out_of_the_mount_does_no_harm(machine):
    proc, cgroups = machine("0::/../../elsewhere\n", {"cpu.max": "100000 100000\n"})
    assert cgroups in control_groups("cpu", proc, cgroups)
