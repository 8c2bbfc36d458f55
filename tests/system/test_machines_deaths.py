"""Tests of jobs on several machines that die, fail, are lost, differ, or are interrupted."""

import os
import re
import signal
import sys
import time

import pytest
from checks.children import wait_until
from mortal_jobs import fixture_machines  # noqa: F401
from mortal_jobs import (
    PROGRESS_PROCESSES, LAUNCHED, RECOVERED, SCRIPT, SLOW, Job, begin, progress_processes,
    needs_machines, slow, with_each_openmpi, with_openmpi_5,
)  # fmt: skip
from processes import FOLDER
from namespaces import Machines
import numpy as np

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


SILENT = "it has not answered for"
#: What mpirun 4.1 says of a daemon that it cannot reach; the second if it waits for one at that moment
LOST_BY_MPIRUN = "lost communication with a remote daemon|unable to reliably start one or more daemons"
CLOSED = "all its connections were closed, so its processes have died"


@pytest.mark.slow
@pytest.mark.parametrize("moment, options", [("call", PROGRESS_PROCESSES), ("meet", LAUNCHED)])
def test_a_dead_machine_is_named_with_its_ranks_and_ends_the_job(machines, tmp_path, moment, options):
    job = Job(machines, tmp_path, moment, **options)
    job.now()
    machines.kill(1)
    code, output = job.end()
    assert code != 0 and f"on node {machines.hosts[1]}" in output, output
    assert output.count("was lost") == 1, output
    assert f"machine {machines.hosts[1]} (ranks 2, 3) was lost: {CLOSED}" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("moment, options", [("call", LAUNCHED), *slow(("meet", PROGRESS_PROCESSES))])
def test_both_machines_that_are_left_name_the_dead_one(tmp_path, moment, options):
    with Machines(3) as machines:
        job = Job(machines, tmp_path, moment, ranks=(2, 1, 1), **options)
        job.now()
        machines.kill(1)
        code, output = job.end()
        lost = f"machine {machines.hosts[1]} (rank 2) was lost: {CLOSED}"
        assert code != 0 and output.count("was lost") == output.count(lost) == 2, output


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["call", "meet", "overlap"])
def test_a_cut_link_is_named_and_ends_the_job_on_both_sides(machines, tmp_path, moment):
    first, second = machines.hosts
    config = tmp_path / "job.toml"
    config.write_text(f"[ranks]\n{first} = 1\n{second} = 3\n")
    job = Job(machines, tmp_path, moment, (1, 3), launch=["--config", str(config)])
    job.now()
    machines.cut(1)
    code, output = job.end()
    assert code != 0 and f"machine {second} (ranks 1, 2, 3) was lost: {SILENT}" in output, output


@SLOW
def test_a_launched_job_without_its_couriers_sees_a_cut_link(machines, tmp_path):
    """By the connections between mpirun and its daemons, as before MPI has been initialized."""
    job = Job(machines, tmp_path, "call", **LAUNCHED)
    for machine in range(2):
        job.job.send(machine, progress_processes(job, machine), signal.SIGSTOP)
    job.now()
    machines.cut(1)
    code, output = job.end(limit=10)
    assert code != 0 and re.search(LOST_BY_MPIRUN, output), output


@pytest.mark.slow
@SLOW
@pytest.mark.parametrize("moment", ["call", "meet", "center"])
def test_couriers_see_a_cut_link_where_mpirun_does_not(machines, tmp_path, moment):
    job = Job(machines, tmp_path, moment, **PROGRESS_PROCESSES)
    job.now()
    machines.cut(1)
    code, output = job.end()
    assert code != 0 and f"machine {machines.hosts[1]} (ranks 2, 3) was lost: {SILENT}" in output, output


@pytest.mark.slow
def test_a_machine_whose_processes_are_stopped_is_not_lost(machines, tmp_path):
    job = Job(machines, tmp_path, "meet", **PROGRESS_PROCESSES)
    stopped = [*job.pids[2:], *progress_processes(job, 1)]
    job.job.send(1, stopped, signal.SIGSTOP)
    time.sleep(5)  # longer than the limit
    job.job.send(1, stopped, signal.SIGCONT)
    assert "lost" not in job.job.output
    job.kill(3)
    code, output = job.end(limit=RECOVERED)
    assert code == 0 and "recovered" in output and "lost" not in output, output


@SLOW
@with_openmpi_5
@pytest.mark.parametrize("loss, cause", [("kill", "lost"), ("cut", f"was lost: {SILENT}")])
def test_a_lost_machine_ends_a_job_of_openmpi_5_with_an_error(machines, tmp_path, loss, cause):
    job = Job(machines, tmp_path, "meet")
    job.now()
    getattr(machines, loss)(1)
    code, output = job.end()
    assert code != 0 and "machine-b" in output and cause in output, output


@SLOW
def test_a_job_goes_on_over_a_slow_link(machines, tmp_path):
    machines.limit("20mbit")
    done = machines.run("-c", SLOWLY, **LAUNCHED)
    seconds, total = done.check().output.split()
    assert float(seconds) > 3.5 and total == "6.0", done.output  # it was slow, and right


SLOWLY = """
import time
import numpy as np
import theano
import synkhronos as synk

def add_own_number(rank, w):
    w.set_value(w.get_value() + rank.rank)

if __name__ == "__main__":
    synk.fork(4, use_gpu=False)
    w = theano.shared(np.zeros(1_500_000), "w")  # 12 MB
    synk.function([], w.sum())
    synk.distribute()
    synk.spmd(add_own_number, w)
    began = time.monotonic()
    synk.all_reduce(w, "sum")
    print(time.monotonic() - began, np.unique(w.get_value())[0])
"""


@with_each_openmpi
def test_a_machine_with_another_version_is_refused_by_name(machines, tmp_path):
    on_second_machine(tmp_path, "import numpy; numpy.__version__ += '.post9'")
    done = machines.run(SCRIPT, "raise", tmp_path, before_path=tmp_path)
    version = f"{np.__version__}.post9"
    assert done.returncode != 0 and f"and {version} on machine-b" in done.output, done.output
    assert "install the same version on every machine" in done.output
    assert not machines.left()


@pytest.mark.slow
@with_each_openmpi
def test_a_machine_without_the_package_is_named(machines, tmp_path):
    on_second_machine(tmp_path, "import sys; sys.modules['synkhronos'] = None")
    done = machines.run(SCRIPT, "raise", tmp_path, before_path=tmp_path, launch=())
    host = machines.hosts[1]
    assert done.returncode != 0 and f"{host}: {sys.executable} cannot import" in done.output, done.output
    assert "install the same version on every machine" in done.output
    assert not machines.left(30)  # OpenMPI 5 leaves tasks that it has just started to themselves


@pytest.mark.slow
@with_each_openmpi
def test_a_module_that_a_machine_lacks_is_an_error_of_its_first_rank(machines, tmp_path):
    (tmp_path / "own_module.py").write_text("def program(rank):\n    return rank.rank\n")
    on_second_machine(tmp_path, "import sys; sys.modules['own_module'] = None")
    code = (
        "import synkhronos as synk\n"
        "def program(rank):\n"
        "    import own_module\n"
        "    return own_module.program(rank)\n"
        "if __name__ == '__main__':\n"
        "    synk.fork(4, use_gpu=False)\n"
        "    synk.spmd(program)\n"
    )
    done = machines.run("-c", code, before_path=tmp_path, launch=())
    error = "WorkerError: rank 2 raised ModuleNotFoundError: import of own_module"
    assert done.returncode != 0 and error in done.output, done.output
    assert not machines.left()


def on_second_machine(folder, code):
    """Let each Python on the second machine run this code at its start."""
    (folder / "sitecustomize.py").write_text(
        f"import socket\nif socket.gethostname().startswith('machine-b'):\n    {code}\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank, moment", [(5, "use"), (7, "meet")])
def test_a_script_goes_on_with_four_machines_after_the_death_of_a_rank_of_one(tmp_path, rank, moment):
    """Of the third machine, and of the fourth."""
    environment = {**PROGRESS_PROCESSES["environment"], "SYNKHRONOS_RANKS": "2"}
    with Machines(4) as machines:
        script = FOLDER / "programs" / "restarted_on_machines.py"
        done = machines.run(
            script, "rank", rank, moment, 8, cwd=tmp_path, tasks=2, environment=environment, timeout=400
        )
        assert done.check().output.splitlines()[-1] == "restarted with 8 of 8", done.output
        assert not machines.left()
