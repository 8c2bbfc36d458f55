"""Tests of ``launch --restart``, by an mpirun that is a script, and on machines made of namespaces."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from mortal_jobs import SLOW, needs_machines, with_each_openmpi
from namespaces import Machines
from processes import FOLDER

from synkhronos.__main__ import main
from synkhronos.machines.job import ending
from synkhronos.machines.job.launcher import find_mpirun

SCRIPT = FOLDER / "programs" / "restarted_job.py"
FLAGS = {"THEANO_FLAGS": "mode=FAST_COMPILE"}  # nothing to compile
LOST = "python -m synkhronos: the script has started"  # and nothing of its end
# A host of which there is a file has no power. ``line-N`` has the arguments of the N-th job.
MPIRUN = """#!/bin/sh
cd {folder}
case "$*" in
*--version*) echo "mpirun (Open MPI) {version}" ;;
*net_if_stats*) exit 1 ;; # which addresses the machines have
*ending.py*) for host in a b c; do
    case "$*" in *"-H $host "*) test -e off-$host && echo "no route to $host" >&2 && exit 1 ;; esac
    done; exit 0 ;;
*) echo x >> count; n=$(wc -l < count); echo "$@" > line-$n; {job} ;;
esac
"""


@pytest.fixture
def launch(programs, tmp_path):
    """Function that runs ``launch`` with an mpirun that runs some lines of a shell for each job.

    It returns the exit code, and the lines that ``launch`` has written. A signal is sent to it when
    there is a file ``runs``.
    """

    def start(job, *options, number=None):
        mpirun, version = tmp_path / "mpirun", find_mpirun().version  # or it is passed over
        mpirun.write_text(MPIRUN.format(folder=shlex.quote(str(tmp_path)), version=version, job=job))
        mpirun.chmod(0o755)
        options = "--mpi", "--mca plm_rsh_agent AGENT", *options
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = programs.run(be_launch, options, number, cwd=tmp_path, environment=environment)
        lines = [line for line in done.stderr.splitlines() if "synkhronos launch: " in line]
        return done.returncode, [line.partition("launch: ")[2] for line in lines]

    return start


def be_launch(options, number):
    if number is not None:
        threading.Thread(target=kill_when_it_runs, args=[number], daemon=True).start()
    sys.exit(main(["launch", *options, "-c", "pass"]))


def kill_when_it_runs(number):
    wait_for(Path("runs").exists, 30)
    os.kill(os.getpid(), number)


def hosts_of(tmp_path, number):
    """Return the hosts, and the number of restarts, of the job with a number."""
    words = (tmp_path / f"line-{number}").read_text().split()
    [restarts] = [one.partition("=")[2] for one in words if one.startswith("SYNKHRONOS_RESTARTS=")]
    return words[words.index("-H") + 1].split(",")[::2], int(restarts)


LOSS = "a machine or a task was lost"


def test_a_job_is_started_again_on_the_hosts_that_can_be_reached_and_that_are_named_now(
    launch, tmp_path
):
    (tmp_path / "hosts").write_text("a\nb\n")
    lose = f"echo '{LOST}' >&2; exit 205"
    job = f"""case $n in
    1) touch off-b; {lose} ;;
    2) rm off-b; echo c >> hosts; {lose} ;;
    3) {lose} ;;
    *) exit 3 ;; esac"""
    code, said = launch(job, "--hostfile", "hosts", "--restart", "9")
    assert [hosts_of(tmp_path, one) for one in (1, 2, 3, 4)] == [
        (["a", "b"], 0), (["a"], 1), (["a", "b", "c"], 2), (["a", "b", "c"], 3),
    ]  # fmt: skip
    assert code == 3 and said == [
        "b cannot be reached: no route to b",
        f"restart 1 of 9 on a: {LOSS}",
        f"restart 2 of 9 on a, b, c: {LOSS}",
        f"restart 3 of 9 on a, b, c: {LOSS}",
    ]


def test_a_number_of_machines_is_the_largest_and_other_hosts_take_the_place_of_lost_ones(
    launch, tmp_path
):
    job = f"touch off-a; test $n = 2 && exit 0; echo '{LOST}' >&2; exit 205"
    code, said = launch(job, "--hosts", "a,b,c", "-n", "2", "--restart", "1")
    assert code == 0 and said[1:] == [f"restart 1 of 1 on b, c: {LOSS}"]
    assert [hosts_of(tmp_path, one)[0] for one in (1, 2)] == [["a", "b"], ["b", "c"]]


def test_the_code_is_that_of_the_last_job_after_as_many_restarts_as_were_asked_for(launch, tmp_path):
    code, said = launch(f"echo '{LOST}' >&2; exit 20$n", "--hosts", "a", "--restart", "1")
    assert code == 202 and said[-1] == f"the job is not started again after 1 restarts: {LOSS}"
    (tmp_path / "off-a").touch()
    code, said = launch("kill -9 $$", "--hosts", "a", "--restart", "2")
    cause = "mpirun was ended by SIGKILL"
    assert code == 137
    assert said[-1] == f"the job is not started again, as no host can be reached: {cause}"


def test_a_machine_that_cannot_be_reached_at_the_start_is_lost(launch):
    job = "test $n = 2 && exit 0; touch off-a; exit 213"
    code, said = launch(job, "--hosts", "a,b", "--restart", "1")
    assert code == 0
    assert said[1:] == ["restart 1 of 1 on b: a could not be reached at the start"]


def test_a_job_that_does_not_start_on_hosts_that_can_be_reached_is_no_loss(launch):
    assert launch("exit 3", "--hosts", "a,b", "--restart", "1") == (3, [])


def test_a_damaged_file_of_hosts_leaves_those_of_before(launch, tmp_path):
    (tmp_path / "hosts").write_text("a\nb\n")
    job = f"test $n = 2 && exit 0; echo '???' > hosts; echo '{LOST}' >&2; exit 205"
    code, said = launch(job, "--hostfile", "hosts", "--restart", "1")
    assert code == 0 and hosts_of(tmp_path, 2)[0] == ["a", "b"]
    assert "'???'; the hosts are those of before" in said[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_of_the_user_ends_the_restarts(launch, tmp_path, number):
    job = f"trap 'echo {LOST} >&2; exit 1' TERM URG; touch runs; while :; do sleep 0.1; done"
    code, said = launch(job, "--hosts", "a", "--restart", "3", number=number)
    assert said == [] and code == (1 if number == signal.SIGINT else 128 + number)
    assert (tmp_path / "count").read_text() == "x\n"


def test_a_success_is_no_loss_whatever_was_said(launch):
    job = "echo '[a] machine b (rank 2) was lost: its first process has died' >&2"
    assert launch(job, "--hosts", "a", "--restart", "1") == (0, [])


def test_processes_of_a_job_are_ended_and_no_others(monkeypatch):
    monkeypatch.setattr(ending, "_LEAVING", 0.1)
    sleeping = [
        subprocess.Popen(["sleep", "60"], env={"SYNKHRONOS_JOB": name}) for name in ("one", "another")
    ]
    try:
        wait_for(lambda: ending.find_processes("SYNKHRONOS_JOB=one"), 10)
        assert ending.end_processes("SYNKHRONOS_JOB=one")
        assert sleeping[0].wait(10) == -signal.SIGKILL and sleeping[1].poll() is None
    finally:
        for one in sleeping:
            one.kill()
            one.wait()


@pytest.mark.parametrize(
    "options, message",
    [
        (("--hosts", "a", "--restart", "-1"), "--restart: expected a number from 0 on, got -1"),
        (("--restart", "1"), "--restart: name the machines by --hosts, --hostfile or --config"),
    ],
)
def test_wrong_options_are_said_before_anything_starts(capsys, options, message):
    with pytest.raises(SystemExit):
        main(["launch", *options, "-c", "pass"])
    assert message in capsys.readouterr().err


def wait_for(function, seconds, job=None):
    """Wait until a function returns something true, and return it; fail if the job ends before."""
    until = time.monotonic() + seconds
    while not (found := function()):
        if time.monotonic() > until:
            raise AssertionError(f"not within {seconds} s\n{job.job.output if job else ''}")
        if job is not None and not job.is_running():
            done = job.job.wait(10)
            raise AssertionError(f"the job has ended with {done.returncode}\n{done.output}")
        time.sleep(0.05)
    return found


@pytest.fixture
def machines(request):
    """Three machines, with OpenMPI 4 if the test does not say otherwise."""
    with Machines(3, prefix=getattr(request, "param", None)) as made:
        yield made


class Trained:
    """A job with two ranks on each machine, started again up to `most` times after losses."""

    PATIENCE = 600  # seconds, for anything that takes a few on an idle machine

    def __init__(self, machines, folder, most):
        self.machines, self.folder = machines, folder
        options = ("--ranks", "2", "--restart", str(most))
        self.job = machines.start(SCRIPT, folder, "on", cwd=folder, environment=FLAGS, launch=options)

    def wait_for(self, function):
        return wait_for(function, self.PATIENCE, self)

    def is_running(self):
        """Whether the job runs. It may have no command line for a moment, when it begins."""
        for _ in range(50):
            if any(" launch " in line for line in self.machines.processes(0).values()):
                return True
            time.sleep(0.1)
        return False

    def began(self, number):
        """Wait for the start with a number; return the step at which it begins, and its hosts."""
        path = self.folder / f"began-{number}"
        self.wait_for(path.exists)
        step, ranks = json.loads(path.read_text())
        return step, [host for host, _ in ranks[::2]]

    def step(self):
        """Return the number of steps that were taken."""
        path = self.folder / "step"
        return int(path.read_text() or 0) if path.exists() else 0

    def lose_task(self, machine):
        """Kill a leader or progress process on a machine."""
        tasks = self.machines.tasks(machine)
        os.kill(min(tasks), signal.SIGKILL)

    def end(self):
        """Let the script end; check that nothing is left. Return its last line, and all output."""
        (self.folder / "enough").touch()
        done = self.job.wait(self.PATIENCE).check()
        assert not self.machines.left(5), done.output
        return [one for one in done.output.splitlines() if one.startswith("ended")][-1], done.output

    def check(self, line, programs):
        """Compare the parameters with those of a run of one machine that was not interrupted."""
        count = int(line.split()[2])
        with np.load(self.folder / "end.npz") as saved:
            found = dict(saved)
        (self.folder / "alone").mkdir()
        programs.run_script(
            SCRIPT, self.folder / "alone", count, timeout=self.PATIENCE,
            environment={"SYNKHRONOS_RANKS": "2", **FLAGS},
        )  # fmt: skip
        with np.load(self.folder / "alone" / "end.npz") as expected:
            assert found["exact"].tolist() == expected["exact"].tolist()
            np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-9)


@SLOW
@needs_machines
@with_each_openmpi
def test_training_goes_on_without_lost_machines_and_with_those_that_come_back(
    machines, tmp_path, programs
):
    first, second, third = machines.hosts
    job = Trained(machines, tmp_path, 9)
    assert job.began(0) == (0, [first, second, third])
    job.wait_for(lambda: job.step() >= 2)
    machines.kill(2)
    step, hosts = job.began(1)
    assert step >= 2 and hosts == [first, second]
    machines.start_machine(third)
    job.wait_for(lambda: job.step() >= step + 2)
    machines.cut(1)
    after, hosts = job.began(2)
    assert after >= step + 2 and hosts == [first, third]
    machines.plug_in(1)
    job.wait_for(lambda: job.step() >= after + 2)
    job.lose_task(2)
    last, hosts = job.began(3)
    assert last >= after + 2 and hosts == [first, second, third]
    line, output = job.end()
    assert line.endswith("shares [2, 2, 1, 1, 1, 1]")
    assert [one.partition(" on ")[0] for one in output.splitlines() if "launch: restart" in one] == [
        f"python -m synkhronos launch: restart {one} of 9" for one in (1, 2, 3)
    ]
    job.check(line, programs)
