"""The commands, run as a user runs them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def command(*arguments, options=("-m", "synkhronos"), **variables):
    """Run ``python -m synkhronos ARGUMENTS`` without the settings that an environment brings."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("THEANO_FLAGS", "THEANORC")}
    inherited["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(ROOT), inherited.get("PYTHONPATH")) if part
    )
    return subprocess.run(
        [sys.executable, *options, *map(str, arguments)],
        env={**inherited, "THEANORC": os.devnull, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def script(tmp_path):
    """Write a script and return its path."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def test_run_makes_a_script_work_that_imports_theano_first(script):
    path = script("import theano\nprint(theano.__version__)\n")
    answer = command("run", path)
    assert answer.stdout == "1.0.5\n", answer.stderr


def test_run_gives_the_script_what_python_would(script, tmp_path):
    path = script("import sys\nprint(__name__, sys.argv, sys.path[0], 'theano' in sys.modules)\n")
    answer = command("run", path, "--help", "-x", "a b")
    expected = f"__main__ {[str(path), '--help', '-x', 'a b']} {tmp_path} False\n"
    assert answer.stdout == expected, answer.stderr


def test_run_keeps_the_scripts_own_flags(script):
    path = script("import os\nprint(os.environ['THEANO_FLAGS'])\n")
    assert command("run", path, THEANO_FLAGS="floatX=float32").stdout.endswith(",floatX=float32\n")


def test_run_exits_as_the_script_does(script):
    assert command("run", script("raise SystemExit(7)")).returncode == 7


def test_run_shows_the_scripts_traceback_alone(script):
    path = script("def fail():\n    raise KeyError('lost')\nfail()\n")
    answer = command("run", path)
    assert answer.returncode == 1
    assert answer.stderr.startswith(f'Traceback (most recent call last):\n  File "{path}", line 3')
    assert "synkhronos" not in answer.stderr


def test_run_dies_of_the_signal_that_the_script_dies_of(script):
    path = script("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert command("run", path).returncode == -signal.SIGKILL


def test_run_of_a_missing_script_says_so(tmp_path):
    answer = command("run", tmp_path / "none.py")
    assert answer.returncode == 2
    assert "none.py" in answer.stderr


@pytest.mark.parametrize(
    "options", [("-O", "-m", "synkhronos"), ("-O", "-msynkhronos"), ("-Om", "synkhronos")]
)
def test_run_hands_on_the_interpreters_options(script, options):
    path = script("import sys\nprint(sys.flags.optimize)\n")
    assert command("run", path, options=options).stdout == "1\n"


def test_no_command_shows_the_help():
    answer = command()
    assert answer.returncode == 2
    assert "doctor" in answer.stdout


@pytest.fixture
def too_new_numpy(tmp_path):
    """Make a folder that hides NumPy behind one that is too new."""
    package = tmp_path / "hiding" / "numpy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '2.0.0'\n")
    return {"PYTHONPATH": os.pathsep.join([str(package.parent), str(ROOT)])}


def test_doctor_works_where_the_package_cannot_be_imported(too_new_numpy):
    answer = command("doctor", **too_new_numpy)
    assert answer.returncode == 1
    assert "problem  NumPy          2.0.0" in answer.stdout
    assert "Traceback" not in answer.stderr


def test_run_with_a_wrong_numpy_says_one_sentence(script, too_new_numpy):
    answer = command("run", script("print('reached')"), **too_new_numpy)
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == 1 and "got NumPy 2.0.0" in answer.stderr


def test_doctor_finds_this_machine_in_order():
    answer = command("doctor")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    for name in ("Python", "NumPy", "compiler", "Theano", "cores", "memory", "GPUs", "NCCL"):
        assert f" {name} " in answer.stdout
