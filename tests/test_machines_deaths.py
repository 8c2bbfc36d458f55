"""Tests of jobs in which a rank, a machine or a link dies, or a machine has other packages."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest
from checks.children import wait_until
from namespaces import OPENMPI_5, Machines, why_no_mpi, why_no_namespaces, why_no_openmpi_5
from processes import FOLDER

WHY_NOT = why_no_mpi() or why_no_namespaces()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"no machines made of namespaces: {WHY_NOT}")

needs_openmpi_5 = pytest.mark.skipif(bool(why_no_openmpi_5()), reason=why_no_openmpi_5())

SCRIPT = FOLDER / "programs" / "mortal.py"
SLOW = pytest.mark.slow
PROMISED = 5  # seconds from a death to the end of the job
SILENT = "it has not answered for"
CLOSED = "all its connections were closed, so its processes have died"
#: Two tasks on each machine, a leader and a courier
COURIERS = {"tasks": 2, "environment": {"SYNKHRONOS_SPARE_TASKS": "1"}}


def slow(*values):
    return [pytest.param(*one, marks=SLOW) if type(one) is tuple else pytest.param(one, marks=SLOW)
            for one in values]


class Job:
    """A job with four ranks on its machines, which have begun to compute.

    Parameters
    ----------
    machines : Machines
    folder : Path
    moment : str
        What the script does.
    ranks : sequence of int
        The number of ranks on each machine.

    Attributes
    ----------
    pids : list of int
        Of each rank, as its machine sees it.
    """

    def __init__(self, machines, folder, moment, ranks=(2, 2), **options):
        self.machines = machines
        self.job = machines.start(SCRIPT, moment, folder, cwd=folder, **options)
        try:
            wait_until(lambda: (folder / "ranks").exists(), 120)
        except AssertionError:
            self.job.wait(1)  # fails with what it has printed
        facts = json.loads((folder / "ranks").read_text())
        self.pids = [pid for pid, _ in facts]
        wanted = [host for host, count in zip(machines.hosts, ranks) for _ in range(count)]
        assert [host for _, host in facts] == wanted
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


def couriers(job, machine):
    """Return the process ids of the courier of a job on a machine, in a list."""
    ranks = job.pids[2:] if machine else job.pids[:2]
    return [
        pid
        for pid, command in job.machines.processes(machine).items()
        if "python" in command.split()[0]
        and not {"keeper.py", "launch"} & {Path(word).name for word in command.split()}
        and pid not in ranks
    ]


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
def test_a_dead_leader_is_named_and_ends_the_job(lasting, tmp_path, moment):
    job = Job(lasting, tmp_path, moment, launch=())
    job.now()
    job.signal(2, signal.SIGKILL)
    code, output = job.end()
    lost = f"machine {lasting.hosts[1]} (ranks 2, 3) was lost: its first process has died"
    assert code != 0 and lost in output and "signal 9" in output, output
    assert output.count("was lost") == 1, output


def test_a_dead_leader_ends_the_job_without_couriers(lasting, tmp_path):
    job = Job(lasting, tmp_path, "meet")
    job.now()
    job.signal(2, signal.SIGKILL)
    code, output = job.end()
    assert code != 0 and "machine-b" in output and "signal 9" in output, output


@pytest.mark.parametrize("moment", ["center", *slow("idle")])
def test_a_dead_courier_ends_the_job(lasting, tmp_path, moment):
    job = Job(lasting, tmp_path, moment, **COURIERS)
    job.now()
    job.job.send(1, couriers(job, 1), signal.SIGKILL)
    code, output = job.end()
    lost = f"machine {lasting.hosts[1]} (ranks 2, 3) was lost: its second process has died"
    assert code != 0 and lost in output and "signal 9" in output, output
    assert output.count("was lost") == 1, output


@pytest.mark.parametrize("moment, rank", [("center", 3), ("again", 1), ("overlap", 3),
                                          *slow(("center", 1), ("overlap", 1))])  # fmt: skip
def test_a_dead_rank_is_named_also_while_couriers_work(lasting, tmp_path, moment, rank):
    job = Job(lasting, tmp_path, moment, **COURIERS)
    job.now()
    job.signal(rank, signal.SIGKILL)
    code, output = job.end(limit=15)  # with another world
    assert code == 0 and "recovered" in output, output
    assert f"rank {rank} (killed by SIGKILL)" in output, output


def test_a_dead_master_is_named_and_ends_the_job(lasting, tmp_path):
    job = Job(lasting, tmp_path, "doze", launch=())
    job.now()
    job.signal(0, signal.SIGKILL)
    code, output = job.end()
    lost = f"machine {lasting.hosts[0]} (ranks 0, 1) was lost: its first process has died"
    assert code != 0 and lost in output and "signal 9" in output, output
    assert output.count("was lost") == 1, output


def test_a_job_that_is_ended_by_a_signal_has_lost_nothing(lasting, tmp_path):
    job = Job(lasting, tmp_path, "doze", launch=())
    [launcher] = [pid for pid, line in lasting.processes(0).items() if " launch " in line]
    job.now()
    job.job.send(0, [launcher], signal.SIGTERM)
    code, output = job.end()
    assert code == 128 + signal.SIGTERM and "lost" not in output, output


@pytest.mark.parametrize("moment, options", [("call", COURIERS), *slow(("meet", {"launch": ()}))])
def test_a_dead_machine_is_named_with_its_ranks_and_ends_the_job(dying, tmp_path, moment, options):
    job = Job(dying, tmp_path, moment, **options)
    job.now()
    dying.kill(1)
    code, output = job.end()
    assert code != 0 and f"on node {dying.hosts[1]}" in output, output
    assert output.count("was lost") == 1, output
    assert f"machine {dying.hosts[1]} (ranks 2, 3) was lost: {CLOSED}" in output, output


@pytest.mark.parametrize("moment, options", [("call", {"launch": ()}), *slow(("meet", COURIERS))])
def test_both_machines_that_are_left_name_the_dead_one(tmp_path, moment, options):
    with Machines(3) as machines:
        job = Job(machines, tmp_path, moment, ranks=(2, 1, 1), **options)
        job.now()
        machines.kill(1)
        code, output = job.end()
        lost = f"machine {machines.hosts[1]} (rank 2) was lost: {CLOSED}"
        assert code != 0 and output.count("was lost") == output.count(lost) == 2, output


@pytest.mark.parametrize("moment", ["call", *slow("meet", "overlap")])
def test_a_cut_link_is_named_and_ends_the_job_on_both_sides(dying, tmp_path, moment):
    first, second = dying.hosts
    config = tmp_path / "job.toml"
    config.write_text(f"[ranks]\n{first} = 1\n{second} = 3\n")
    job = Job(dying, tmp_path, moment, (1, 3), launch=["--config", str(config)])
    job.now()
    dying.cut(1)
    code, output = job.end()
    assert code != 0 and f"machine {second} (ranks 1, 2, 3) was lost: {SILENT}" in output, output


def test_a_launched_job_without_its_couriers_sees_a_cut_link(dying, tmp_path):
    """By the connections between mpirun and its daemons, as before MPI has been initialized."""
    job = Job(dying, tmp_path, "call", launch=())
    for machine in range(2):
        job.job.send(machine, couriers(job, machine), signal.SIGSTOP)
    job.now()
    dying.cut(1)
    code, output = job.end(limit=10)
    assert code != 0 and "lost communication with a remote daemon" in output, output


@pytest.mark.parametrize("moment", ["call", *slow("meet", "center")])
def test_couriers_see_a_cut_link_where_mpirun_does_not(dying, tmp_path, moment):
    job = Job(dying, tmp_path, moment, **COURIERS)
    job.now()
    dying.cut(1)
    code, output = job.end()
    assert code != 0 and f"machine {dying.hosts[1]} (ranks 2, 3) was lost: {SILENT}" in output, output


def test_a_machine_whose_processes_are_stopped_is_not_lost(lasting, tmp_path):
    job = Job(lasting, tmp_path, "meet", **COURIERS)
    stopped = [*job.pids[2:], *couriers(job, 1)]
    job.job.send(1, stopped, signal.SIGSTOP)
    time.sleep(5)  # longer than the limit
    job.job.send(1, stopped, signal.SIGCONT)
    assert "lost" not in job.job.output
    job.now()
    job.signal(3, signal.SIGKILL)
    code, output = job.end(limit=15)  # with another world
    assert code == 0 and "recovered" in output and "lost" not in output, output


@needs_openmpi_5
@pytest.mark.parametrize("loss, cause", [("kill", "lost"), *slow(("cut", f"was lost: {SILENT}"))])
def test_a_lost_machine_ends_a_job_of_openmpi_5_with_an_error(tmp_path, loss, cause):
    with Machines(2, prefix=OPENMPI_5) as machines:
        job = Job(machines, tmp_path, "meet")
        job.now()
        getattr(machines, loss)(1)
        code, output = job.end()
        assert code != 0 and "machine-b" in output and cause in output, output


@needs_openmpi_5
@SLOW
def test_a_dead_master_is_named_and_ends_a_job_of_openmpi_5(tmp_path):
    with Machines(2, prefix=OPENMPI_5) as machines:
        job = Job(machines, tmp_path, "doze")
        job.now()
        job.signal(0, signal.SIGKILL)
        code, output = job.end()
        lost = f"machine {machines.hosts[0]} (ranks 0, 1) was lost: its first process has died"
        assert code != 0 and lost in output, output


@SLOW
def test_a_job_goes_on_over_a_slow_link(lasting, tmp_path):
    lasting.limit("20mbit")
    try:
        done = lasting.run("-c", SLOWLY, launch=())
    finally:
        lasting.limit(None)
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


@pytest.mark.parametrize("moment", ["save", *slow("step")])
def test_a_new_run_resumes_from_the_last_checkpoint_bit_for_bit(of_each_version, tmp_path, moment):
    machines, script = of_each_version, FOLDER / "programs" / "saving.py"
    job = machines.start(script, tmp_path, moment, launch=())
    try:
        wait_until(lambda: (tmp_path / "now").exists(), 120)
    except AssertionError:
        job.wait(1)  # fails with what it has printed
    [leader, *_] = sorted(
        pid for pid, line in machines.processes(1).items() if "synkhronos.world.machines" in line
    )
    job.send(1, [leader], signal.SIGKILL)
    done = job.wait(60)
    assert done.returncode != 0 and "its first process has died" in done.output, done.output
    assert not machines.left()
    assert [path.name for path in tmp_path.glob("*.npz")] == ["run.npz"]
    done = machines.run(script, tmp_path, "end", launch=()).check()
    first, *others = done.output.splitlines()
    assert first in ("begins with 6", "begins with 7") and others == ["begins with 0", "the same"]


def test_the_next_job_removes_what_a_killed_mpirun_has_left(lasting, tmp_path):
    spare = {"SYNKHRONOS_SPARE_TASKS": "1"}
    job = Job(lasting, tmp_path, "doze", tasks=2, btl=None, environment=spare)
    [mpirun] = [pid for pid, line in lasting.processes(0).items() if line.startswith("mpirun")]
    job.job.send(0, [mpirun], signal.SIGKILL)
    assert job.job.wait(30).returncode == -signal.SIGKILL
    wait_until(lambda: not lasting.processes(0) and not lasting.processes(1))
    assert "vader_segment" in str(lasting.shared_memory(0))  # elsewhere, mpirun's daemon removes them
    lasting.run("-c", "pass", tasks=2, btl=None, environment=spare).check()
    assert not lasting.left()


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


@pytest.fixture(params=["4", pytest.param("5", marks=[needs_openmpi_5, SLOW])])
def of_each_version(request, lasting):
    """Machines with OpenMPI 4 or 5."""
    if request.param == "4":
        yield lasting
        return
    with Machines(2, prefix=OPENMPI_5) as made:
        yield made


def test_a_machine_with_another_version_is_refused_by_name(of_each_version, tmp_path):
    on_second_machine(tmp_path, "import numpy; numpy.__version__ = '1.23.99'")
    done = of_each_version.run(SCRIPT, "raise", tmp_path, before_path=tmp_path)
    assert done.returncode != 0 and "and 1.23.99 on machine-b" in done.output, done.output
    assert "install the same version on every machine" in done.output
    assert not of_each_version.left()


def test_a_machine_without_the_package_is_named(of_each_version, tmp_path):
    on_second_machine(tmp_path, "import sys; sys.modules['synkhronos'] = None")
    done = of_each_version.run(SCRIPT, "raise", tmp_path, before_path=tmp_path, launch=())
    host = of_each_version.hosts[1]
    assert done.returncode != 0 and f"{host}: {sys.executable} cannot import" in done.output, done.output
    assert "install the same version on every machine" in done.output
    assert not of_each_version.left(30)  # OpenMPI 5 leaves tasks that it has just started to themselves


def test_a_module_that_a_machine_lacks_is_an_error_of_its_first_rank(of_each_version, tmp_path):
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
    done = of_each_version.run("-c", code, before_path=tmp_path, launch=())
    error = "WorkerError: rank 2 raised ModuleNotFoundError: import of own_module"
    assert done.returncode != 0 and error in done.output, done.output
    assert not of_each_version.left()


def on_second_machine(folder, code):
    """Let each Python on the second machine run this code at its start."""
    (folder / "sitecustomize.py").write_text(
        f"import socket\nif socket.gethostname().startswith('machine-b'):\n    {code}\n"
    )
