"""Tests of jobs on several machines in which processes die, fail or are interrupted."""

import os
import signal
import time

import pytest
from checks.children import wait_until
from mortal_jobs import (
    PROGRESS_PROCESSES,
    LAUNCHED,
    RECOVERED,
    SLOW,
    Job,
    begin,
    progress_processes,
    needs_machines,
    slow,
    with_each_openmpi,
)
from mortal_jobs import fixture_machines  # noqa: F401
from processes import FOLDER

pytestmark = needs_machines


@pytest.mark.parametrize(
    "moment, rank",
    [("wait", 3), *slow(("graph", 3), ("meet", 3), ("wait", 1), ("meet", 1), ("graph", 1))],
)
def test_a_dead_rank_is_named_and_the_script_can_go_on(machines, tmp_path, moment, rank):
    check_that_the_script_goes_on(Job(machines, tmp_path, moment), rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment, rank", [("center", 3), ("again", 1), ("overlap", 3), ("center", 1), ("overlap", 1)]
)
def test_a_dead_rank_is_named_also_while_couriers_work(machines, tmp_path, moment, rank):
    check_that_the_script_goes_on(Job(machines, tmp_path, moment, **PROGRESS_PROCESSES), rank)


def check_that_the_script_goes_on(job, rank):
    job.kill(rank)
    code, output = job.end(limit=RECOVERED)
    assert code == 0 and "recovered" in output, output
    assert f"rank {rank} (killed by SIGKILL)" in output, output
    assert rank < 2 or "machine-b" in output, output


def assert_lost(job, machine, cause):
    """The job ends with a single line that names the lost machine, its ranks and the cause."""
    code, output = job.end()
    ranks = ["0, 1", "2, 3"][machine]
    assert code != 0 and output.count("was lost") == 1, output
    assert f"{job.machines.hosts[machine]} (ranks {ranks}) was lost: {cause} has died" in output, output
    return output


@pytest.mark.slow
@pytest.mark.parametrize("moment, rank", [("call", 2), ("meet", 2), ("idle", 2)])
def test_a_dead_first_process_is_named_and_ends_the_job(machines, tmp_path, moment, rank):
    job = Job(machines, tmp_path, moment, **LAUNCHED)
    job.kill(rank)
    assert "signal 9" in assert_lost(job, rank // 2, "its first process")


@pytest.mark.slow
@with_each_openmpi
def test_a_dead_script_ends_the_job(machines, tmp_path):
    job = Job(machines, tmp_path, "doze", **LAUNCHED)
    job.kill(0)
    code, output = job.end()
    assert code == 128 + signal.SIGKILL and "was lost" not in output, output
    assert "the script was ended by SIGKILL" in output, output


@pytest.mark.slow
@SLOW
def test_a_dead_first_process_ends_the_job_without_couriers(machines, tmp_path):
    job = Job(machines, tmp_path, "meet")
    job.kill(2)
    code, output = job.end()
    assert code != 0 and "machine-b" in output and "signal 9" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["center", "idle"])
def test_a_dead_courier_is_named_and_ends_the_job(machines, tmp_path, moment):
    job = Job(machines, tmp_path, moment, **PROGRESS_PROCESSES)
    job.now()
    job.job.send(1, progress_processes(job, 1), signal.SIGKILL)
    assert "signal 9" in assert_lost(job, 1, "its second process")


@pytest.mark.slow
def test_a_job_that_is_ended_by_a_signal_has_lost_nothing(machines, tmp_path):
    job = Job(machines, tmp_path, "doze", **LAUNCHED)
    [launcher] = [pid for pid, line in machines.processes(0).items() if " launch " in line]
    job.now()
    job.job.send(0, [launcher], signal.SIGTERM)
    code, output = job.end()
    assert code == 128 + signal.SIGTERM and "lost" not in output, output


@SLOW
@with_each_openmpi
@pytest.mark.parametrize("moment", ["save", "step"])
def test_a_new_run_resumes_from_the_last_checkpoint_bit_for_bit(machines, tmp_path, moment):
    script = FOLDER / "programs" / "saving.py"
    job = begin(machines, script, tmp_path, moment, file=tmp_path / "now", **LAUNCHED)
    os.kill(min(pid for pid, task in machines.tasks(1).items() if task == 2), signal.SIGKILL)
    done = job.wait(60)
    assert done.returncode != 0 and "its first process has died" in done.output, done.output
    assert not machines.left()
    assert [path.name for path in tmp_path.glob("*.npz")] == ["run.npz"]
    done = machines.run(script, tmp_path, "end", **LAUNCHED).check()
    first, *others = done.output.splitlines()
    assert first in ("begins with 6", "begins with 7") and others == ["begins with 0", "the same"]


@pytest.mark.slow
def test_the_next_job_removes_what_a_killed_mpirun_has_left(machines, tmp_path):
    job = Job(machines, tmp_path, "doze", btl=None, **PROGRESS_PROCESSES)
    [mpirun] = [pid for pid, line in machines.processes(0).items() if line.startswith("mpirun")]
    job.job.send(0, [mpirun], signal.SIGKILL)
    assert job.job.wait(30).returncode == -signal.SIGKILL
    wait_until(lambda: not machines.processes(0) and not machines.processes(1))
    assert "vader_segment" in str(machines.shared_memory(0))  # elsewhere, mpirun's daemon removes them
    machines.run("-c", "pass", btl=None, **PROGRESS_PROCESSES).check()
    assert not machines.left()


@pytest.mark.slow
def test_an_exception_of_a_rank_comes_with_its_traceback_and_the_world_goes_on(machines, tmp_path):
    job = Job(machines, tmp_path, "raise")
    job.now()
    code, output = job.end(limit=RECOVERED)
    assert code == 0 and output.splitlines() == [f"rank {rank} raised" for rank in (1, 2, 3)], output


@pytest.mark.slow
@pytest.mark.parametrize("moment, times", [("wait", 2), ("doze", 1), ("far", 2)])
def test_ctrl_c_in_the_script_ends_the_job(machines, tmp_path, moment, times):
    job = Job(machines, tmp_path, moment, **PROGRESS_PROCESSES)
    for _ in range(times):  # the first one lets the command end
        job.now()
        job.signal(0, signal.SIGINT)
        time.sleep(0.5)
    code, output = job.end(limit=RECOVERED)
    assert code != 0 and "KeyboardInterrupt" in output and "was lost" not in output, output


@pytest.mark.slow
def test_ctrl_c_in_a_program_asks_all_machines_to_stop(machines, tmp_path):
    job = Job(machines, tmp_path, "compute")
    job.now()
    job.signal(0, signal.SIGINT)
    code, output = job.end()
    assert code == 0 and "stopped [True, True, True, True]" in output, output
