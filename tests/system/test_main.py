"""Tests of the command line, run as a user would run it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import theano
from made_up_libraries import fixture_binaries, fixture_put  # noqa: F401
from made_up_libraries import all_are_visible, path_of, wheels_of
from processes import ROOT, run_interpreter

from synkhronos.__main__ import main
from synkhronos._version import __version__
from synkhronos.host.nvidia import find

PROGRAMS = ROOT / "tests" / "programs"


def command(*arguments, options=("-m", "synkhronos"), **variables):
    """Run ``python -m synkhronos ARGUMENTS`` without Theano's settings from the environment."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    without = {"THEANO_FLAGS": None, "THEANORC": os.devnull, "PYTHONPATH": os.pathsep.join(paths)}
    return run_interpreter(*options, *arguments, code=None, environment={**without, **variables})


@pytest.fixture
def script(tmp_path):
    """Function that writes a script, and returns its path."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def test_run_makes_a_script_work_that_imports_theano_first(script):
    path = script("import theano\nprint(theano.__version__)\n")
    answer = command("run", path)
    assert answer.stdout == "1.0.5\n", answer.stderr


def test_run_shows_that_a_theano_function_of_the_script_compiles():
    answer = command("run", PROGRAMS / "slow_to_compile.py", SYNKHRONOS_PROGRESS="1")
    assert answer.stdout.startswith("3.0 synkhronos: compiling theano.function 1 (slow); "), answer


def test_run_gives_the_script_what_python_would(script, tmp_path):
    path = script("import sys\nprint(__name__, sys.argv, sys.path[0], 'theano' in sys.modules)\n")
    answer = command("run", path, "--help", "-x", "a b")
    expected = f"__main__ {[str(path), '--help', '-x', 'a b']} {tmp_path} False\n"
    assert answer.stdout == expected, answer.stderr


@pytest.mark.slow
def test_run_makes_scan_work_in_a_script_that_does_not_import_the_library():
    # A cache of its own: to read a key with an operation of the library imports it.
    flags = os.environ["THEANO_FLAGS"].replace("-tests", "-scripts")
    answer = command("run", PROGRAMS / "loop_of_theano.py", THEANO_FLAGS=flags)
    assert answer.returncode == 0, answer.stderr
    sums, kind, imported = answer.stdout.splitlines()
    assert (sums, imported) == ("[1. 3. 6.]", "False")
    assert kind != "function"  # the loop is compiled


def test_run_makes_lasagne_importable(script):
    pytest.importorskip("lasagne")
    path = script("import lasagne\nprint(lasagne.layers.MaxPool2DLayer.__name__)\n")
    answer = command("run", path, THEANO_FLAGS=os.environ["THEANO_FLAGS"])
    assert answer.stdout == "MaxPool2DLayer\n", answer.stderr


@pytest.mark.parametrize("customized", [None, "mark = 1", "import sys; mark = list(sys.path)"])
def test_run_leaves_the_paths_and_customizations_of_a_script_as_they_are(tmp_path, customized):
    path = PROGRAMS / "paths.py"
    folder = tmp_path / "customized"
    folder.mkdir()
    if customized is not None:
        (folder / "sitecustomize.py").write_text(customized)
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    expected = command(path, options=(), **variables)
    answer = command("run", path, **variables)
    without = expected.stdout
    if customized is None:  # ours stays where Python finds no other; the child has none
        without = without.replace("False None", "True None", 1)
    assert answer.stdout == without and without, answer.stderr
    assert answer.stderr == expected.stderr


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


def test_a_package_that_imports_synkhronos_can_be_run_by_its_name(tmp_path):
    """While Python locates the package, synkhronos imports its public names only on first use."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import synkhronos as synk\nimport theano\nfrom synkhronos import fork, Data\n"
    )
    (package / "__main__.py").write_text("from package import *\nprint(synk.fork is fork, synk.Data)\n")
    places = os.pathsep.join([str(tmp_path), str(ROOT)])
    answer = command(options=("-m", "package"), PYTHONPATH=places)
    assert answer.stdout == "True <class 'synkhronos.arrays.data.Data'>\n", answer.stderr


def test_run_takes_a_module_with_its_arguments(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "part.py").write_text(
        "import sys, theano\nprint(__name__, __package__, sys.argv, theano.__version__)\n"
    )
    places = os.pathsep.join([str(tmp_path), str(ROOT)])
    answer = command("run", "-m", "package.part", "--help", "-m", "x y", PYTHONPATH=places)
    argv = [str(tmp_path / "package" / "part.py"), "--help", "-m", "x y"]
    assert answer.stdout == f"__main__ package {argv} 1.0.5\n", answer.stderr


CODE = "import sys, theano\nprint(__name__, sys.argv, theano.__version__)\n"


@pytest.mark.parametrize("given", [("-c", CODE), (f"-c{CODE}",)], ids=["apart", "joined"])
def test_run_takes_code_with_its_arguments(given):
    answer = command("run", *given, "-h", "-c", "x")
    assert answer.stdout == "__main__ ['-c', '-h', '-c', 'x'] 1.0.5\n", answer.stderr


def main_that_ends(capsys, *arguments):
    """Run a command that ends in the parser, in this process; return its status and output."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    printed = capsys.readouterr()
    return end.value.code, printed.out, printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected the path of a SCRIPT, -m MODULE or -c CODE"),
        (("",), "expected the path of a SCRIPT, -m MODULE or -c CODE"),
        (("-m",), "expected a MODULE after -m"),
        (("-c",), "expected a string of CODE after -c"),
        (("--fast", "x.py"), "expected a SCRIPT, -m MODULE or -c CODE, got the option --fast"),
        (("--",), "expected a SCRIPT, -m MODULE or -c CODE, got the option --"),
    ],
)
def test_run_without_a_program_says_what_it_takes(capsys, arguments, message):
    status, _, said = main_that_ends(capsys, "run", *arguments)
    usage, error = said.splitlines()
    assert status == 2 and error == f"python -m synkhronos run: error: {message}"
    assert usage.startswith("usage: python -m synkhronos run [-h] SCRIPT | -m MODULE | -c CODE")


def test_the_help_and_the_version_are_shown(capsys):
    assert main_that_ends(capsys, "--version") == (0, f"Synkhronos {__version__}\n", "")
    status, printed, _ = main_that_ends(capsys, "run", "--help")
    assert status == 0 and "-m MODULE" in printed


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


@pytest.fixture
def nvidia(put, tmp_path):
    """Environment of a machine with a driver and pip's wheels, whose libraries have version suffixes."""
    if all_are_visible():
        pytest.skip("no library is hidden on this machine")
    return {
        **path_of(put("driver", "libcuda.so.1")),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(wheels_of(put))]),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


def test_run_gives_the_drivers_and_pips_libraries_their_bare_names(nvidia, tmp_path):
    path = PROGRAMS / "load_cuda_by_name.py"
    assert command(path, options=(), **nvidia).returncode == 1  # fails without ``run``
    answer = command("run", path, **nvidia)
    *loaded, folders = answer.stdout.splitlines()
    assert loaded == ["libcuda.so.1", "libnvrtc.so.13", "libcublas.so.13", "libnccl.so.2"], answer
    (links,) = (tmp_path / "cache" / "synkhronos").iterdir()
    assert folders == f"{links}:{nvidia['LD_LIBRARY_PATH']}"


def test_run_goes_on_where_there_is_no_place_for_links(script, nvidia, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    places = dict.fromkeys(("XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "TMPDIR"), str(tmp_path / "open"))
    answer = command("run", script("print('reached')"), **{**nvidia, **places})
    assert answer.stdout == "reached\n"
    assert answer.stderr.startswith("python -m synkhronos run: there is no place for links")
    assert "others may write in" in answer.stderr


@pytest.mark.skipif(bool(find()), reason="this machine has a driver")
def test_run_changes_nothing_without_a_driver(script, tmp_path):
    path = script("import os\nprint(os.environ.get('LD_LIBRARY_PATH'))\n")
    expected = f"{os.environ.get('LD_LIBRARY_PATH')}\n"
    assert command("run", path, XDG_CACHE_HOME=str(tmp_path)).stdout == expected
    assert not list(tmp_path.glob("synkhronos*"))


def test_the_doctor_ends_quietly_when_its_reader_has_read_enough():
    doctor = [sys.executable, "-m", "synkhronos", "doctor"]
    with subprocess.Popen(doctor, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.readline().startswith(b"ok       Python")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_no_command_shows_the_help():
    answer = command()
    assert answer.returncode == 2
    assert "doctor" in answer.stdout


@pytest.fixture
def too_new_numpy(tmp_path):
    """Environment with a fake NumPy package of an unsupported, newer version."""
    package = tmp_path / "hiding" / "numpy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '3.0.0'\n")
    return {"PYTHONPATH": os.pathsep.join([str(package.parent), str(ROOT)])}


def test_doctor_works_where_the_package_cannot_be_imported(too_new_numpy):
    answer = command("doctor", **too_new_numpy)
    assert answer.returncode == 1
    assert "problem  NumPy          3.0.0" in answer.stdout
    assert "Traceback" not in answer.stderr


def test_run_with_a_wrong_numpy_says_one_sentence(script, too_new_numpy):
    answer = command("run", script("print('reached')"), **too_new_numpy)
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == 1 and "got NumPy 3.0.0" in answer.stderr


def packages_without(folder, *missing):
    """Make a folder with links to the packages of this environment, some of which are left out."""
    folder.mkdir()
    for place in (Path(theano.__file__).parent.parent, Path(numpy.__file__).parent.parent):
        for package in place.iterdir():
            link = folder / package.name
            if package.name.partition("-")[0] not in missing and not os.path.lexists(link):
                link.symlink_to(package)
    return folder


def doctor_says(folder, *names, **variables):
    """Return what the doctor says of some checks, where only the packages in a folder are installed."""
    paths = os.pathsep.join([str(folder), str(ROOT)])
    answer = command("doctor", options=("-S", "-m", "synkhronos"), PYTHONPATH=paths, **variables)
    assert (answer.returncode, answer.stderr) == (1, "")
    assert answer.stdout.endswith("Something required is missing.\n")
    entries = re.split(r"\n(?! )", answer.stdout)
    found = {entry[9:23].strip(): entry for entry in entries}
    return [re.sub(r"\s+", " ", found[name]) for name in names]


def test_doctor_names_the_theano_that_is_missing(tmp_path):
    folder = packages_without(tmp_path / "packages", "theano", "Theano")
    numpy_, theano_ = doctor_says(folder, "NumPy", "Theano")
    assert numpy_ == f"ok NumPy {numpy.__version__}"
    assert theano_.startswith("problem Theano not installed, or another package in its place -> ")
    assert theano_.endswith("no Theano is installed. To fix this: python -m synkhronos install")


def test_doctor_finds_this_machine_in_order():
    answer = command("doctor")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    for name in ("Python", "NumPy", "compiler", "Theano", "cores", "memory", "CUDA", "GPUs", "NCCL"):
        assert f" {name} " in answer.stdout


COMMAND = """
import sys
from synkhronos.__main__ import main

assert "theano" not in sys.modules
sys.exit(main())
"""


def test_the_installed_command_starts_without_theano(tmp_path, script):
    """It is a script by this name that calls `main`, as pip writes it."""
    path = tmp_path / "synkhronos"
    path.write_text(COMMAND)
    answer = command(path, "run", script("print('theano' in __import__('sys').modules)"), options=())
    assert answer.stdout == "False\n", answer.stderr
