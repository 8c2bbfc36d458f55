"""Tests of ``launch``, as a user runs it: each task of mpirun on this machine counts as a machine."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest
from prelude import restore_signals
from processes import FOLDER, ROOT


pytestmark = [
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="the tests need mpirun: openmpi-bin"),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="the tests need mpi4py"),
]

PROGRAMS = FOLDER / "programs"
MARK = "SYNKHRONOS_OF_TEST"  # a variable that all processes of a job have


@pytest.fixture
def started(tmp_path):
    """Function that starts a command on two machines, and checks at the end that no process is left."""
    mark, processes = uuid.uuid4().hex, []

    def start(command, code, *arguments, **variables):
        script = code
        if isinstance(code, str):
            script = tmp_path / "script.py"
            script.write_text(code)
        paths = [str(ROOT), os.environ.get("PYTHONPATH")]
        process = subprocess.Popen(
            [*command, str(script), *arguments],
            env={
                **os.environ, "SYNKHRONOS_TASKS_ARE_MACHINES": "2", MARK: mark,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "OMPI_MCA_btl_tcp_if_include": "lo",  # other interfaces may not reach themselves
                **variables,
            },
            cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=restore_signals,
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()
    limit = time.monotonic() + 5
    while (left := [one for one in psutil.process_iter() if marked(one, mark)]) and (
        time.monotonic() < limit
    ):
        time.sleep(0.1)
    for one in left:
        one.kill()
    assert not left


def marked(process, mark):
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


LAUNCH = [sys.executable, "-m", "synkhronos", "launch", "-n", "2"]


@pytest.fixture
def launch(started):
    """A function that runs a file or code on two machines; it returns the exit code and the output."""

    def run(code, *arguments, options=()):
        process = started([*LAUNCH, *options], code, *arguments)
        return outcome(process)

    return run


def outcome(process, seconds=60):
    """Return the exit code, stdout and stderr. Bytes, as \\r must not become another character."""
    printed, said = process.communicate(timeout=seconds)
    return process.returncode, printed.decode(), said.decode()


def test_a_script_runs_on_two_machines_and_the_lines_of_the_other_begin_with_its_name(launch, tmp_path):
    (tmp_path / "job.toml").write_text("ranks = 4\nenvironment = {OWN = 'a b;c'}\n")
    options = ["--config", "job.toml", "--ranks", "2"]
    code, printed, said = launch(PROGRAMS / "launched_program.py", "-n", "3", options=options)
    assert code == 0, said
    ranks = [(machine, "a b;c") for machine in "0022"]  # the task of its leader
    expected = [f"4 {ranks} ['-n', '3']", "printed by 0", "printed by 1"]  # by two processes
    assert sorted(printed.splitlines()) == expected
    assert "first\rsecond" in said
    others = [line for line in said.splitlines() if line.startswith(f"[{os.uname().nodename}:1] ")]
    texts = sorted(line.partition("] ")[2] for line in others)
    expected = [f"{rank} {line} {'.' * (line % 90)}" for rank in (2, 3) for line in range(300)]
    assert texts == sorted([*expected, "printed by 2", "printed by 3"])


ENDINGS = {
    "ends without having used the library": ("print('end')", 0, ""),
    "imports the library only": ("import synkhronos", 0, ""),
    "raises": ("raise KeyError('lost')", 1, "KeyError: 'lost'"),
    "exits": ("raise SystemExit(3)", 3, ""),
    "exits at once": ("import os, synkhronos as synk; synk.fork(2); os._exit(4)", 4, ""),
    "is killed": (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137,
        "the script was ended by SIGKILL",
    ),
    "raises in a world": (
        "import synkhronos as synk; synk.fork(2); synk.data([1.0]); raise KeyError('lost')",
        1, "KeyError: 'lost'",
    ),
    "kills the leader of the other machine": (
        (PROGRAMS / "launched_kill.py", "2"),
        137, "rank 2 with PID",
    ),
    "kills a rank of the other machine": (
        (PROGRAMS / "launched_kill.py", "4"),
        1, "a worker died: rank 3 (killed by SIGKILL)",
    ),
}  # fmt: skip
QUICK = ("is killed",)


@pytest.mark.parametrize(
    "what", [pytest.param(one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in ENDINGS]
)
def test_the_job_ends_as_its_script(launch, what):
    text, expected, part = ENDINGS[what]
    code, _, said = launch(*([text] if isinstance(text, str) else text))
    assert (code, part in said) == (expected, True), said


@pytest.mark.slow
@pytest.mark.parametrize(
    "times, wanted, words",
    [
        (1, (130, "interrupted [0. 0. 0. 0.]\n"), "KeyboardInterrupt"),  # waits for the command
        (2, (1, ""), "a command was interrupted"),  # ends it
    ],
)
def test_interrupts_end_the_job(started, times, wanted, words):
    process = started([*LAUNCH, "--ranks", "1"], PROGRAMS / "launched_sleep.py")
    assert process.stdout.readline() == b"sleeping\n", process.stderr.read()
    for _ in range(times):
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
    code, printed, said = outcome(process, 30)
    assert (code, printed) == wanted and words in said, said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_that_ends_the_launcher_ends_the_job(started, number):
    process = started([*LAUNCH, "--ranks", "1"], PROGRAMS / "launched_sleep.py")
    assert process.stdout.readline() == b"sleeping\n", process.stderr.read()
    began = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert time.monotonic() - began < 5


CORES = """
import os
import synkhronos as synk
if __name__ == "__main__":
    number = lambda: len(os.sched_getaffinity(0))
    print(number(), synk.fork(use_gpu=False), synk.spmd(lambda rank: number()))
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the test needs two cores")
def test_tasks_that_are_bound_to_cores_become_ranks_that_have_all_of_them(started):
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = ["mpirun", *root, "--oversubscribe", "--bind-to", "core", "-n", "2"]
    run = [sys.executable, "-m", "synkhronos", "run"]
    process = started([*mpirun, *run], CORES, SYNKHRONOS_TASKS_ARE_MACHINES="")
    code, printed, said = outcome(process)
    assert (code, printed) == (0, "1 2 [2, 2]\n"), said
