"""Tests of the ``mpirun`` line, of the help and errors of ``launch``, and of the prefixes of lines."""

import os
import shlex
import signal
import subprocess
import sys

import pytest

from synkhronos.__main__ import main
from synkhronos.host import job
from synkhronos.machines.job import launcher
from synkhronos.machines.job.config import Job, JobError, make_job
from processes import ROOT, run_interpreter
from synkhronos.machines.job.tasks import prefixed

ROOT_OPTION = ["--allow-run-as-root"] if os.geteuid() == 0 else []


def line_of(what, environ=None, **options):
    """Return the options of the mpirun line, without those that are always there."""
    line = launcher.command(what, ["PROGRAM"], environ=environ or {}, **options)
    always = ["mpirun", *ROOT_OPTION, "--bind-to", "none"]
    assert line[: len(always)] == always
    return " ".join(line[len(always) :])


ALWAYS = (
    "--mca oob_tcp_keepalive_time 1 --mca oob_tcp_keepalive_intvl 1 --mca oob_tcp_keepalive_probes 4 "
    "--mca ess_base_forward_signals SIGURG,SIGPWR,SIGUSR1,SIGUSR2 "
)
SCRIPT = "-x SYNKHRONOS_LAUNCHED=1 -x SYNKHRONOS_SPARE_TASKS=1 "


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
         "OPENBLAS_CORETYPE", "MKL_CBWR", "MPI4PY_LIBMPI", "MPI4PY_RC_FINALIZE", "SYNKHRONOS_TASK"], "1",
    )  # fmt: skip
    line = line_of(Job(["a"], 1, {"THEANO_FLAGS": "2"}, {}, []), environ, is_script=False)
    names = (
        "MKL_CBWR", "MPI4PY_LIBMPI", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "OPENBLAS_CORETYPE",
        "PYTHONPATH", "SYNKHRONOS_LOG",
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


def write(path, text):
    """Write a shell script."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path.parent)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A function that lets mpi4py load a library, which has the path ``tmp_path/own/lib``."""

    def load(name):
        path = str(tmp_path / "own" / "lib" / "libmpi.so.40")
        about = {"mpi4py": "4.1.2", "library": name, "path": path}
        monkeypatch.setattr(launcher, "probe", lambda code: about)

    return load


def openmpi(folder, version, name="mpirun"):
    """Write an mpirun of OpenMPI; return its folder."""
    return write(folder / name, f"echo 'mpirun (Open MPI) {version}'")


def test_the_mpirun_is_that_of_the_library_that_mpi4py_loads(tmp_path, library):
    library("Open MPI v5.0.11")
    (tmp_path / "own").mkdir()
    own = openmpi(tmp_path / "own" / "bin", "5.0.11", "mpirun.openmpi")
    other, same = openmpi(tmp_path / "a", "4.1.4"), openmpi(tmp_path / "b", "5.0.11")
    hydra = write(tmp_path / "c" / "mpirun", "echo HYDRA build details:")
    for path, folder, passed_over in (
        ("", f"{own}/mpirun.openmpi", ""),
        (f"{same}:{other}", f"{same}/mpirun", ""),
        (f"{other}:{same}", f"{same}/mpirun", f"{other}/mpirun, which is 4.1.4"),
        (other, f"{own}/mpirun.openmpi", f"{other}/mpirun, which is 4.1.4"),
        (hydra, f"{own}/mpirun.openmpi", f"{hydra}/mpirun, which is 'HYDRA build details:'"),
    ):
        environ = {"PATH": path}
        found = launcher.find_mpirun(environ)
        assert found == (folder, "5.0.11", passed_over) and environ["HOME"] and found.survives_deaths


def test_a_library_without_its_mpirun_is_named_with_what_was_found(tmp_path, library):
    library("Open MPI v5.0.11")
    with pytest.raises(JobError, match="need mpirun of OpenMPI 5.0.11, whose .* but found none in PATH"):
        launcher.find_mpirun({"PATH": "/nowhere"})
    other = openmpi(tmp_path / "a", "4.1.4")
    with pytest.raises(JobError, match=f"but found {other}/mpirun, which is 4.1.4; on every machine"):
        launcher.find_mpirun({"PATH": other})


def test_another_mpi_of_mpi4py_is_named_with_what_helps(tmp_path, monkeypatch, library):
    library("MPICH Version: 5.0.2")
    monkeypatch.setattr(launcher, "_is_installed", lambda name: name == "mpich")
    monkeypatch.setattr(launcher.environment, "library_folders", lambda: ([tmp_path], []))
    (tmp_path / "libmpi.so.40").touch()
    with pytest.raises(JobError) as error:
        launcher.find_mpirun({"PATH": ""})
    assert str(error.value) == (
        f"launch needs OpenMPI, but mpi4py loads MPICH Version: 5.0.2, from {tmp_path}/own/lib/"
        f"libmpi.so.40; to fix this: python -m pip uninstall mpich, or set "
        f"MPI4PY_LIBMPI={tmp_path}/libmpi.so.40, on every machine"
    )


RUN = "import sys; from synkhronos.machines.job import running; sys.exit(running.run(sys.argv[1:]).code)"


def run_mpirun(script, **options):
    """Run a shell script as launch runs mpirun; return the completed process."""
    return run_interpreter("-c", RUN, "sh", "-c", script, code=None, **options)


@pytest.mark.parametrize(
    ("written", "code", "wanted"),
    [
        ("has exited with 0", 1, 0),  # os._exit(0), which mpirun calls a failure
        ("has exited with 7", 1, 7),  # of OpenMPI 5, where another task ends the job
        ("was ended by SIGKILL", 0, 137),
        ("has exited with 1", 137, 137),  # after the loss of another task
        ("has started", 0, 1),  # without an end; OpenMPI 5 may return 0 after it has lost a machine
        ("has started", 3, 3),
    ],
)
def test_the_exit_code_is_that_of_the_script(written, code, wanted):
    line = f"echo before >&2; echo python -m synkhronos: the script {written} >&2; exit {code}"
    done = run_mpirun(line)
    said = [line for line in done.stderr.splitlines() if "SIGKILL" not in line]
    assert (done.returncode, said) == (wanted, ["before"])


TASK = """
import os, signal, sys, time
from synkhronos.machines.job import tasks
tasks.go_on_in_child(is_launched=True)
def save(*_):
    time.sleep(0.5)
    print("saved", flush=True)
    os._exit(5)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_script_has_time_after_sigterm(tmp_path):
    """In the place of mpirun is a shell that passes signals on as mpirun does."""
    passing = f"trap 'kill -PWR $!' PWR; {shlex.join([sys.executable, '-c', TASK])} & wait $!; wait $!"
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, "sh", "-c", passing], stdout=pipe, stderr=pipe
    )
    assert process.stdout.readline() == b"ready\n"
    process.terminate()
    assert process.communicate(timeout=30) == (b"saved\n", b"") and process.returncode == 5


def test_sigterm_ends_a_job_whose_script_has_not_started():
    soon = "from synkhronos.machines.job import running; running._ANSWER = 0.3; "
    line = [sys.executable, "-c", soon + RUN, "sh", "-c", "trap '' PWR; echo ready; sleep 60"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    process.stdout.close()


def test_a_script_on_this_machine_reads_the_input_of_launch():
    code = (
        "import os, sys; from synkhronos.machines.job import tasks\n"
        "from synkhronos.machines.job.config import Job\n"
        "given = tasks.own_input(Job(['localhost'], 1, {}, {}, []))['SYNKHRONOS_INPUT']\n"
        "if os.fork(): sys.exit(os.waitpid(-1, 0)[1])\n"
        "os.close(0); tasks.open_input(given); print(sys.stdin.read())\n"
        "tasks.open_input(given + '0'); print(repr(os.read(0, 9)))\n"
    )
    assert run_interpreter("-c", code, input="a\nb").stdout == "a\nb\nb''\n"


BRIDGE = {"172.17.0.1/16": True}


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ([{"10.0.0.1/24": True}, {"10.0.0.2/255.255.255.0": True}], []),
        ([{"10.0.0.1/24": True, **BRIDGE}, {"10.0.0.2/24": True, **BRIDGE}], ["10.0.0.0/24"]),
        ([{"10.0.0.1/24": True, **BRIDGE}, {"10.0.0.2/24": True}], ["10.0.0.0/24"]),
        ([{"10.0.0.1/24": True, "10.9.0.1/24": False}, {"10.0.0.2/24": True}], ["10.0.0.0/24"]),
        (
            [{"10.0.0.1/24": True, **BRIDGE}, {"10.1.0.2/24": True, **BRIDGE}],
            ["10.0.0.0/24", "10.1.0.0/24"],
        ),
        ([BRIDGE, BRIDGE], []),
        ([{}, {"10.0.0.2/24": True}], []),
    ],
)
def test_machines_use_the_networks_that_they_share(machines, expected):
    assert launcher.choose_networks(machines) == expected


def test_networks_are_asked_for_unless_the_user_has_named_some():
    answer = '{"networks": {"10.0.0.1/24": true, "10.0.1.1/24": false}}'
    ask = ["printf", answer + answer.replace(".1/", ".2/")]
    assert launcher.network_options(ask, 2, []) == ["--mca", "btl_tcp_if_include", "10.0.0.0/24"]
    assert launcher.network_options(ask, 2, ["OMPI_MCA_btl_tcp_if_exclude"]) == []
    assert launcher.network_options(ask, 3, []) == []


def test_errors_arrive_whole_also_if_others_hold_the_pipe(tmp_path):
    holder = "sleep 60 > out & echo $! > pid"
    line = f"{holder}; (head -c 1000000 /dev/zero | tr '\\0' a; echo last) >&2; exit 3"
    done = run_mpirun(line, cwd=tmp_path, environment={"PYTHONPATH": os.pathsep.join(sys.path)})
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # it lives, so it has held the pipe
    assert (done.returncode, done.stderr) == (3, "a" * 1000000 + "last\n")


def test_a_missing_mpi4py_is_named(monkeypatch):
    def probe(code):
        raise launcher.ProbeError("No module named 'mpi4py'")

    monkeypatch.setattr(launcher, "probe", probe)
    with pytest.raises(JobError, match=r"python -m pip install 'synkhronos\[mpi\]'"):
        launcher.find_mpirun({"PATH": ""})


@pytest.mark.parametrize("text", ["0", "x", "-1", "2.5"])
def test_a_wrong_number_of_ranks_in_the_environment_is_named(text):
    with pytest.raises(ValueError, match=f"SYNKHRONOS_RANKS: expected a number from 1 on, got '{text}'"):
        job.ranks({"SYNKHRONOS_RANKS": text})


P = b"[a] "


def test_each_line_gets_the_prefix_and_none_is_held_back():
    given = iter([b"one\ntwo\nth", b"ree\n", b"rest"])
    made = prefixed(given, P)
    assert [next(made), next(made)] == [b"[a] one\n", b"[a] two\n"]
    assert next(given) == b"ree\n"
    assert list(made) == [b"[a] threst\n"]


@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_long_line_is_cut_between_characters(end):
    text = "aäöü" * 30
    made = b"".join(prefixed(iter([text.encode() + end]), P, 20)).decode()
    assert all(len(line.encode()) < 20 for line in made.splitlines())
    assert made.replace("[a] ", "").replace("\n", "") == text


def test_of_a_line_that_was_overwritten_the_last_state_is_left():
    given = iter([b"1%\r", b"2%\r3%", b"\r4%\r\n", b"5%\r6%\n"])
    assert b"".join(prefixed(given, P)) == b"[a] 4%\n[a] 6%\n"


CODE = """
import os, signal, sys
from synkhronos.machines.job.tasks import prefix_output
prefix_output("a")
os.system("echo from a child")
print("from Python", flush=True)
print("an error", file=sys.stderr, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_process_has_printed_appears_also_if_it_is_killed():
    done = run_interpreter("-c", CODE, code=-9, environment={"PYTHONPATH": str(ROOT)})
    assert done.stdout == "" and done.stderr == "[a] from a child\n[a] from Python\n[a] an error\n"
