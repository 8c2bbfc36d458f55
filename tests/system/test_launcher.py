"""Tests of the ``mpirun`` line, of the help and errors of ``launch``, and of the variables of a job."""

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from synkhronos.__main__ import main
from synkhronos.host import job
from synkhronos.machines.job import launcher
from synkhronos.machines.job.config import Job, JobError, make_job

ROOT_OPTION = ["--allow-run-as-root"] if os.geteuid() == 0 else []


def line_of(what, environ=None, **options):
    """Return the options of the mpirun line, without those that are always there."""
    line = launcher.command(what, ["PROGRAM"], environ=environ or {}, **options)
    always = ["mpirun", *ROOT_OPTION, "--bind-to", "none"]
    assert line[: len(always)] == always
    return " ".join(line[len(always) :])


ALWAYS = (
    "--mca oob_tcp_keepalive_time 1 --mca oob_tcp_keepalive_intvl 1 --mca oob_tcp_keepalive_probes 4 "
    "--mca ess_base_forward_signals SIGURG,SIGUSR1,SIGUSR2 "
)
SCRIPT = "-x SYNKHRONOS_LAUNCHED=1 -x SYNKHRONOS_SPARE_TASKS=1 "


def test_hosts_are_used_in_their_order():
    line = line_of(Job(["b", "a"], 2, {"X": "1 2"}, {}, ["-q"]))
    assert line == f"--map-by seq {ALWAYS}-q -x X=1 2 {SCRIPT}-H b,b,a,a -n 4 PROGRAM"


def test_in_a_batch_job_each_machine_has_a_leader_and_a_courier():
    line = line_of(Job([], 4, {}, {}, []))
    assert line == f"--oversubscribe --map-by ppr:2:node {ALWAYS}{SCRIPT}-n 8 PROGRAM"


def test_machines_with_variables_of_their_own_are_parts_of_the_line():
    what = Job(["b", "a"], 2, {"X": "1"}, {"a": {"SYNKHRONOS_RANKS": "3"}}, [])
    assert line_of(what, is_script=False) == (
        f"--map-by seq {ALWAYS}-x X=1 -H b -n 1 PROGRAM : -x SYNKHRONOS_RANKS=3 -x X=1 -H a -n 1 PROGRAM"
    )


def test_variables_of_this_machine_are_passed_unless_the_job_has_its_own():
    environ = dict.fromkeys(
        ["THEANO_FLAGS", "PYTHONPATH", "SYNKHRONOS_LOG", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "HOME",
         "OPENBLAS_CORETYPE", "MKL_CBWR", "SYNKHRONOS_TASK"], "1",
    )  # fmt: skip
    line = line_of(Job(["a"], 1, {"THEANO_FLAGS": "2"}, {}, []), environ, is_script=False)
    names = (
        "MKL_CBWR", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "OPENBLAS_CORETYPE", "PYTHONPATH",
        "SYNKHRONOS_LOG",
    )  # fmt: skip
    passed = "".join(f"-x {name} " for name in names)
    assert line == f"--map-by seq {ALWAYS}{passed}-x THEANO_FLAGS=2 -H a -n 1 PROGRAM"


def test_the_line_is_printed_with_quotes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.py").touch()
    assert main(["launch", "--hosts", "x,y", "--dry-run", "a b.py", "--ranks", "c d"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[-5:] == ["synkhronos", "run", "a b.py", "--ranks", "c d"]
    assert words[0] == "mpirun" and sys.executable in words


def test_one_machine_needs_no_mpirun(capsys):
    assert main(["launch", "--ranks=2", "--dry-run", "-m", "package"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["env", "SYNKHRONOS_RANKS=2", sys.executable]
    assert words[-5:] == ["-m", "synkhronos", "run", "-m", "package"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected the path of a SCRIPT, -m MODULE or -c CODE"),
        (("-n", "x", "-c", ""), "argument -n: invalid int value: 'x'"),
        (("--rank", "2", "-c", ""), "expected a SCRIPT, -m MODULE or -c CODE, got the option --rank"),
        (("--hosts", "a", "--hostfile", "b", "-c", ""), "expected --hosts or --hostfile, got both"),
        (("--hosts", "a,a", "-c", ""), "--hosts: a is named twice"),
        (("--hosts", "a,b", "none.py"), "there is no script none.py"),
        (("-n", "2", "-c", ""), "-n 2: name the machines by --hosts, --hostfile or --config"),
        (("--hosts", "a", "-c", ""), "several machines need mpirun, which is not in PATH"),
    ],
)
def test_wrong_options_are_said_before_anything_starts(capsys, monkeypatch, arguments, message):
    monkeypatch.setenv("PATH", "/nowhere")
    for name in (*launcher._ALLOCATIONS, job.APART):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as end:
        main(["launch", *arguments])
    said = capsys.readouterr().err
    assert end.value.code == 2 and message in said
    assert said.splitlines()[-1].startswith("python -m synkhronos launch: error: ")


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A command ssh, which knows the settings of one host."""
    program = tmp_path / "ssh"
    program.write_text('#!/bin/sh\n[ "$2" = alias.invalid ] && set . 127.0.0.1\necho hostname $2\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def job_on(hosts, mpi=None):
    return make_job(None, None, hosts, None, None, mpi)


def test_a_machine_whose_name_is_not_known_is_named(ssh, monkeypatch):
    launcher.check_names(job_on("localhost,127.0.0.1,alias.invalid"), {})
    with pytest.raises(
        JobError, match="there is no machine none.invalid: .*; name machines as for 'ssh"
    ):
        launcher.check_names(job_on("localhost,none.invalid"), {})
    for agent in ("--mca plm_rsh_agent AGENT", "--prtemca plm_ssh_agent AGENT"):
        launcher.check_names(job_on("localhost,none.invalid", mpi=agent), {})
    for agent in ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent"):
        launcher.check_names(job_on("none.invalid"), {agent: "AGENT"})
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(JobError, match="there is no machine alias.invalid"):
        launcher.check_names(job_on("alias.invalid"), {})


def test_an_mpirun_of_another_mpi_is_named(tmp_path):
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho HYDRA build details:\n")
    other.chmod(0o755)
    with pytest.raises(JobError, match="is not OpenMPI's, but says 'HYDRA build details:'"):
        launcher.find_mpirun({"PATH": str(tmp_path)})


@pytest.mark.parametrize("said, code, wanted", [("a remote", 0, 1), ("a remote", 3, 3), ("no", 0, 0)])
def test_a_job_that_has_lost_a_machine_does_not_end_with_0(tmp_path, said, code, wanted):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        "#!/bin/sh\nprintf 'PRTE has lost communication' >&2; sleep 0.1\n"
        f"echo ' with {said} daemon.' >&2; exit {code}\n"
    )
    mpirun.chmod(0o755)
    code = "from synkhronos.machines.job import launcher; sys.exit(launcher.run(sys.argv[1:]).code)"
    run = [sys.executable, "-c", f"import sys; {code}", str(mpirun)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == wanted
    assert done.stderr == f"PRTE has lost communication with {said} daemon.\n"


READ = """
import sys
from synkhronos.machines.job import launcher
ending = launcher.run(["sh", "-c", sys.argv[1]], reads_output=True)
sys.stderr.write(ending.printed[-6:])
sys.exit(ending.code)
"""


@pytest.mark.parametrize("others", ["", "sleep 60 & echo $! > pid;"])
def test_an_output_that_is_read_arrives_whole_also_if_others_hold_it(tmp_path, others):
    line = f"{others} head -c 1000000 /dev/zero | tr '\\0' a; echo last; exit 3"
    run = [sys.executable, "-c", READ, line]
    pipe = subprocess.PIPE
    process = subprocess.Popen(run, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)
    time.sleep(1.0)  # mpirun has ended before all is read
    said, errors = process.communicate(timeout=30)
    if others:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # it lives, so it has held the pipe
    assert (process.returncode, said, errors) == (3, "a" * 1000000 + "last\n", "alast\n")


def test_an_mpirun_whose_output_nobody_reads_ends_as_always():
    run = [sys.executable, "-c", READ, "trap '' PIPE; while echo more; do sleep 0.01; done; exit 4"]
    process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "more\n"
    process.stdout.close()
    assert process.wait(30) == 4
    process.stderr.close()


def test_a_missing_mpi4py_is_named(monkeypatch):
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JobError, match=r"python -m pip install 'synkhronos\[mpi\]'"):
        launcher.check_mpi4py()


@pytest.mark.parametrize("text", ["0", "x", "-1", "2.5"])
def test_a_wrong_number_of_ranks_in_the_environment_is_named(text):
    with pytest.raises(ValueError, match=f"SYNKHRONOS_RANKS: expected a number from 1 on, got '{text}'"):
        job.ranks({"SYNKHRONOS_RANKS": text})
