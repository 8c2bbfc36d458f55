"""Tests of jobs that lose a machine, or the network between machines."""

import re
import signal
import time

import pytest
from mortal_jobs import (
    PROGRESS_PROCESSES,
    LAUNCHED,
    RECOVERED,
    SLOW,
    Job,
    progress_processes,
    needs_machines,
    slow,
    with_openmpi_5,
)
from mortal_jobs import fixture_machines  # noqa: F401
from namespaces import Machines

SILENT = "it has not answered for"
#: What mpirun 4.1 says of a daemon that it cannot reach; the second if it waits for one at that moment
LOST_BY_MPIRUN = "lost communication with a remote daemon|unable to reliably start one or more daemons"
CLOSED = "all its connections were closed, so its processes have died"

pytestmark = needs_machines


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
