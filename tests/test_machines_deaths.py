"""Tests of jobs in which a rank, a machine or a link dies, or a machine has other packages."""

import json
import signal
import time

import pytest
from checks.children import wait_until
from namespaces import OPENMPI_5, Machines, why_no_mpi, why_no_namespaces, why_no_openmpi_5
from processes import FOLDER

WHY_NOT = why_no_mpi() or why_no_namespaces()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"no machines made of namespaces: {WHY_NOT}")

SCRIPT = FOLDER / "programs" / "mortal.py"
SLOW = pytest.mark.slow
PROMISED = 5  # seconds from a death to the end of the job


def slow(*values):
    return [pytest.param(*one, marks=SLOW) if type(one) is tuple else pytest.param(one, marks=SLOW)
            for one in values]


class Job:
    """A job with four ranks on two machines, which have begun to compute.

    Attributes
    ----------
    pids : list of int
        Of each rank, as its machine sees it.
    """

    def __init__(self, machines, folder, moment, **options):
        self.machines = machines
        self.job = machines.start(SCRIPT, moment, folder, cwd=folder, **options)
        try:
            wait_until(lambda: (folder / "ranks").exists())
        except AssertionError:
            self.job.wait(0)  # fails with what it has printed
        facts = json.loads((folder / "ranks").read_text())
        self.pids = [pid for pid, _ in facts]
        assert [host for _, host in facts] == [machines.hosts[rank // 2] for rank in range(4)]
        time.sleep(0.5)  # they are in the midst of it

    def signal(self, rank, number):
        self.job.send(rank // 2, [self.pids[rank]], number)

    def end(self, limit=PROMISED):
        """Wait for the end; check that nothing is left. Return the exit code and the output."""
        done = self.job.wait(30)
        left = self.machines.left()
        assert done.seconds - self._died < limit, (done.seconds - self._died, done.output)
        assert not left, (left, done.output)
        return done.returncode, done.output

    def now(self):
        """Note the time of the death."""
        self._died = self.job.seconds


@pytest.fixture(scope="module")
def lasting():
    """Machines for the deaths that they survive."""
    with Machines(2) as made:
        yield made


@pytest.fixture
def dying():
    """Machines for one test."""
    with Machines(2) as made:
        yield made


@pytest.mark.parametrize("moment, rank", [("wait", 3), ("meet", 3), ("graph", 3),
                                          *slow(("wait", 1), ("meet", 1), ("graph", 1))])  # fmt: skip
def test_a_dead_rank_is_named_and_the_script_can_go_on(lasting, tmp_path, moment, rank):
    job = Job(lasting, tmp_path, moment)
    job.now()
    job.signal(rank, signal.SIGKILL)
    code, output = job.end(limit=15)  # with another world
    assert code == 0 and "recovered" in output, output
    assert f"rank {rank} (killed by SIGKILL)" in output, output
    assert rank < 2 or "machine-b" in output, output


@pytest.mark.parametrize("moment", ["call", *slow("meet", "idle")])
def test_a_dead_leader_ends_the_job(lasting, tmp_path, moment):
    job = Job(lasting, tmp_path, moment)
    job.now()
    job.signal(2, signal.SIGKILL)
    code, output = job.end()
    assert code != 0 and "machine-b" in output and "signal 9" in output, output


@pytest.mark.parametrize("moment", ["center", *slow("idle")])
def test_a_dead_courier_ends_the_job(lasting, tmp_path, moment):
    job = Job(lasting, tmp_path, moment, tasks=2, environment={"SYNKHRONOS_SPARE_TASKS": "1"})
    [courier] = [
        pid
        for pid, command in lasting.processes(1).items()
        if "python" in command.split()[0] and "keeper.py" not in command and pid not in job.pids[2:]
    ]
    job.now()
    job.job.send(1, [courier], signal.SIGKILL)
    code, output = job.end()
    assert code != 0 and "machine-b" in output and "signal 9" in output, output


@pytest.mark.parametrize("moment, rank", [("center", 3), ("again", 1), ("overlap", 3),
                                          *slow(("center", 1), ("overlap", 1))])  # fmt: skip
def test_a_dead_rank_is_named_also_while_couriers_work(lasting, tmp_path, moment, rank):
    job = Job(lasting, tmp_path, moment, tasks=2, environment={"SYNKHRONOS_SPARE_TASKS": "1"})
    job.now()
    job.signal(rank, signal.SIGKILL)
    code, output = job.end(limit=15)  # with another world
    assert code == 0 and "recovered" in output, output
    assert f"rank {rank} (killed by SIGKILL)" in output, output


def test_a_dead_master_ends_the_job(lasting, tmp_path):
    job = Job(lasting, tmp_path, "doze")
    job.now()
    job.signal(0, signal.SIGKILL)
    code, output = job.end()
    assert code != 0 and "machine-a" in output and "signal 9" in output, output


@pytest.mark.parametrize("moment", ["call", *slow("meet")])
def test_a_dead_machine_ends_the_job(dying, tmp_path, moment):
    job = Job(dying, tmp_path, moment)
    job.now()
    dying.kill(1)
    code, output = job.end()
    assert code != 0 and "machine-b" in output, output


@pytest.mark.parametrize("moment", ["call", *slow("meet")])
def test_a_cut_link_ends_the_job_on_both_sides(dying, tmp_path, moment):
    job = Job(dying, tmp_path, moment)
    job.now()
    dying.cut(1)
    code, output = job.end()
    assert code != 0 and "machine-b" in output, output


@pytest.mark.skipif(bool(why_no_openmpi_5()), reason=why_no_openmpi_5())
@pytest.mark.parametrize("loss", ["kill", *slow("cut")])
def test_a_lost_machine_ends_a_job_of_openmpi_5_with_an_error(tmp_path, loss):
    with Machines(2, prefix=OPENMPI_5) as machines:
        job = Job(machines, tmp_path, "meet")
        job.now()
        getattr(machines, loss)(1)
        code, output = job.end()
        assert code == 1 and "machine-b" in output, output


def test_an_exception_of_a_rank_comes_with_its_traceback_and_the_world_goes_on(lasting, tmp_path):
    job = Job(lasting, tmp_path, "raise")
    job.now()
    code, output = job.end(limit=15)
    assert code == 0 and output.splitlines() == [f"rank {rank} raised" for rank in (1, 2, 3)], output


@pytest.mark.parametrize("moment, times", [("wait", 2), *slow(("doze", 1), ("far", 2))])
def test_ctrl_c_in_the_script_ends_the_job(lasting, tmp_path, moment, times):
    job = Job(lasting, tmp_path, moment)
    for _ in range(times):  # the first one lets the command end
        job.now()
        job.signal(0, signal.SIGINT)
        time.sleep(0.5)
    code, output = job.end()
    assert code != 0 and "KeyboardInterrupt" in output, output


def test_ctrl_c_in_a_program_asks_all_machines_to_stop(lasting, tmp_path):
    job = Job(lasting, tmp_path, "compute")
    job.now()
    job.signal(0, signal.SIGINT)
    code, output = job.end()
    assert code == 0 and "stopped [True, True, True, True]" in output, output


def test_a_machine_with_another_version_is_refused_by_name(lasting, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import socket, numpy\n"
        "if socket.gethostname().startswith('machine-b'): numpy.__version__ = '1.23.99'\n"
    )
    done = lasting.run(SCRIPT, "raise", tmp_path, before_path=tmp_path)
    assert done.returncode != 0 and "and 1.23.99 on machine-b" in done.output, done.output
    assert "install the same version on every machine" in done.output
    assert not lasting.left()
