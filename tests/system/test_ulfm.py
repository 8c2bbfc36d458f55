"""Tests of jobs that go on when tasks of MPI die: OpenMPI 5 with ULFM, which the set-up installs.

``launch`` starts them, on machines made of namespaces where these are permitted.
"""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from checks.children import wait_until
from mortal_jobs import PROMISED, needs_machines
from namespaces import OPENMPI_5, Machines, why_no_openmpi_5
from processes import FOLDER

from synkhronos.machines.job.reports import DIED
from synkhronos.machines.leaders import FLAG, Leaders, LostError
from specifications.links import NaiveNetwork

needs_ulfm = pytest.mark.skipif(bool(why_no_openmpi_5()), reason=why_no_openmpi_5())
SLOW = pytest.mark.slow
SCRIPT = FOLDER / "programs" / "restarted_on_machines.py"


@pytest.fixture(scope="module")
def machines():
    with Machines(3, prefix=OPENMPI_5) as made:
        yield made


def run(machines, folder, *arguments):
    """Run the script on three machines with two ranks each; return what it prints last."""
    done = machines.run(
        SCRIPT, *arguments, cwd=folder, tasks=2, timeout=300, environment={"SYNKHRONOS_RANKS": "2"}
    )
    return done.check().output.splitlines()[-1]


@needs_ulfm
@SLOW
@pytest.mark.parametrize(
    "number, moment, left",
    [
        (2, "use", 4),  # a leader
        (5, "meet", 6),  # a worker
        (4, "meet", 4),
        (4, "idle", 4),
        (1, "use", 6),
    ],
)
def test_the_script_goes_on_after_a_death_without_the_machine_of_a_leader(
    machines, tmp_path, number, moment, left
):
    said = run(machines, tmp_path, "rank", number, moment, left)
    assert said == f"restarted with {left} of 6"


LATE = """
import pathlib, time
pathlib.Path("began").touch()
time.sleep(60)  # the other tasks wait in MPI_Init meanwhile
"""


@needs_ulfm
@needs_machines
@pytest.mark.parametrize("task", [pytest.param(1, marks=SLOW), 2])
def test_the_job_ends_if_a_task_dies_before_mpi_is_initialized(tmp_path, task):
    """With ULFM, the other tasks would not notice it."""
    (tmp_path / "late.py").write_text(LATE)
    with Machines(2, prefix=OPENMPI_5) as machines:
        job = machines.start(tmp_path / "late.py", cwd=tmp_path, launch=())
        wait_until((tmp_path / "began").exists, 60)
        wait_until(lambda: tasks_in_mpi(machines, task // 2), 60)
        os.kill(tasks_in_mpi(machines, task // 2)[task], signal.SIGKILL)
        died = job.seconds
        done = job.wait(60)
        assert done.returncode and done.seconds - died < PROMISED, done.output
        assert f"{DIED}{machines.hosts[task // 2]}" in done.output, done.output
        assert not machines.left(PROMISED), done.output


def tasks_in_mpi(machines, machine):
    """Return the process of each task of a machine; {} if one does not use MPI's library yet."""
    found = {}
    for pid, task in machines.tasks(machine).items():
        found[task] = min(pid, found.get(task, pid))  # not those that the task has started
    with contextlib.suppress(OSError):
        if len(found) == 2 and all(
            task == 0 or "/libmpi.so" in Path(f"/proc/{pid}/maps").read_text()
            for task, pid in found.items()
        ):
            return found
    return {}


@needs_ulfm
@SLOW
def test_the_script_goes_on_with_the_last_machine(tmp_path):
    with Machines(2, prefix=OPENMPI_5) as machines:
        assert run(machines, tmp_path, "rank", 2, "use", 2) == "restarted with 2 of 4"


@needs_ulfm
@pytest.mark.parametrize("number", [1, pytest.param(0, marks=SLOW)])
def test_the_script_goes_on_without_couriers_if_one_has_died(machines, tmp_path, number):
    assert run(machines, tmp_path, "progress_process", number, "use", 6) == "restarted with 6 of 6"


@needs_ulfm
@SLOW
def test_the_script_goes_on_with_three_of_four_machines(tmp_path):
    with Machines(4, prefix=OPENMPI_5) as machines:
        assert run(machines, tmp_path, "rank", 4, "use", 6) == "restarted with 6 of 8"


def test_a_dead_leader_is_named_until_the_others_acknowledge_it():
    network = NaiveNetwork(3)
    first, _, third = (Leaders(links) for links in network.links())
    first.links.names = ["machine a", "machine b", "machine c"]
    network.lost.add(1)
    first.notify(FLAG, 1)  # nobody waits for the dead
    for call in (first.read_notices, lambda: first.send_order(1, 0, "text")):
        with pytest.raises(LostError, match="^machine b left the job"):
            call()
    third.links.acknowledge()
    third.read_notices()
    with pytest.raises(LostError, match="task 1 left the job"):
        third.links.receive(1, 0)
