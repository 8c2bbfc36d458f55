"""Tests of the command line, run as a user would run it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_libraries import fixture_binaries, fixture_put  # noqa: F401
from made_up_libraries import all_are_visible, path_of, wheels_of

from synkhronos.host import libraries

ROOT = Path(__file__).resolve().parent.parent


def command(*arguments, options=("-m", "synkhronos"), **variables):
    """Run ``python -m synkhronos ARGUMENTS`` without Theano's settings from the environment."""
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


def test_run_gives_the_script_what_python_would(script, tmp_path):
    path = script("import sys\nprint(__name__, sys.argv, sys.path[0], 'theano' in sys.modules)\n")
    answer = command("run", path, "--help", "-x", "a b")
    expected = f"__main__ {[str(path), '--help', '-x', 'a b']} {tmp_path} False\n"
    assert answer.stdout == expected, answer.stderr


LOOP = """
import sys
import theano
import theano.tensor as tt

x = tt.dvector()
total, _ = theano.scan(lambda one, state: one + state, x, tt.zeros(()))
print(theano.function([x], total, mode=theano.Mode("cvm", "fast_compile"))([1, 2, 3]))
print(type(sys.modules["theano.scan_module.scan_perform_ext"].perform).__name__)
print("synkhronos" in sys.modules)
"""


def test_run_makes_scan_work_in_a_script_that_does_not_import_the_library(script):
    flags = os.environ["THEANO_FLAGS"]  # with the cache of the tests
    answer = command("run", script(LOOP), THEANO_FLAGS=flags)
    assert answer.returncode == 0, answer.stderr
    sums, kind, imported = answer.stdout.splitlines()
    assert (sums, imported) == ("[1. 3. 6.]", "False")
    assert kind != "function"  # the loop is compiled


def test_run_makes_lasagne_importable(script):
    pytest.importorskip("lasagne")
    path = script("import lasagne\nprint(lasagne.layers.MaxPool2DLayer.__name__)\n")
    answer = command("run", path, THEANO_FLAGS=os.environ["THEANO_FLAGS"])
    assert answer.stdout == "MaxPool2DLayer\n", answer.stderr


PATHS = """
import os, subprocess, sys
print(sys.path, os.environ.get("PYTHONPATH"), sys.flags)
mark = getattr(sys.modules.get("sitecustomize"), "mark", None)
print("sitecustomize" in sys.modules, mark, flush=True)
if len(sys.argv) == 1:
    subprocess.run([sys.executable, *sys.argv, "child"], check=True)
"""


@pytest.mark.parametrize("customized", [None, "mark = 1", "import sys; mark = list(sys.path)"])
def test_run_leaves_the_paths_and_customizations_of_a_script_as_they_are(script, tmp_path, customized):
    path = script(PATHS)
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


def test_run_reports_a_customization_that_fails_as_python_does(script, tmp_path):
    path = script("print('reached')")
    (tmp_path / "sitecustomize.py").write_text("raise ImportError('lost', name='something')")
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    answer, expected = command("run", path, **variables), command(path, options=(), **variables)
    assert "ImportError: lost" in answer.stderr and answer.stdout == expected.stdout
    assert answer.stderr.splitlines()[0] == expected.stderr.splitlines()[0]


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


def test_run_hands_on_that_output_is_unbuffered(script):
    path = script("import sys\nprint(sys.stdout.write_through)\n")
    assert command("run", path, options=("-u", "-m", "synkhronos")).stdout == "True\n"


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


LOAD = """
import ctypes, os
for name in ("libcuda.so", "libnvrtc.so", "libcublas.so", "libnccl.so"):
    before = set(open("/proc/self/maps"))
    ctypes.CDLL(name)
    print(*{os.path.basename(line.split()[-1]) for line in set(open("/proc/self/maps")) - before
            if ".so" in line})
print(os.environ["LD_LIBRARY_PATH"])
"""


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


def test_run_gives_the_drivers_and_pips_libraries_their_bare_names(script, nvidia, tmp_path):
    path = script(LOAD)
    assert command(path, options=(), **nvidia).returncode == 1  # fails without ``run``
    answer = command("run", path, **nvidia)
    *loaded, folders = answer.stdout.splitlines()
    assert loaded == ["libcuda.so.1", "libnvrtc.so.13", "libcublas.so.13", "libnccl.so.2"], answer
    (links,) = (tmp_path / "cache" / "synkhronos").iterdir()
    assert folders == f"{links}:{nvidia['LD_LIBRARY_PATH']}"


def test_run_inside_of_run_adds_nothing(script, nvidia):
    path = script("import os\nprint(os.environ['LD_LIBRARY_PATH'])\n")
    answer = command("run", path, **nvidia)
    variables = {**nvidia, "LD_LIBRARY_PATH": answer.stdout.strip()}
    assert command("run", path, **variables).stdout == answer.stdout


def test_libgpuarray_finds_the_driver_in_run(script, nvidia):
    pytest.importorskip("pygpu")
    path = script("import pygpu\npygpu.init('cuda0')\n")
    assert "Could not load" in command(path, options=(), **nvidia).stderr
    assert "Could not find symbol" in command("run", path, **nvidia).stderr  # in the fake library


def test_run_goes_on_where_there_is_no_place_for_links(script, nvidia, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    places = dict.fromkeys(("XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "TMPDIR"), str(tmp_path / "open"))
    answer = command("run", script("print('reached')"), **{**nvidia, **places})
    assert answer.stdout == "reached\n"
    assert answer.stderr.startswith("python -m synkhronos run: there is no place for links")
    assert "others may write in" in answer.stderr


@pytest.mark.skipif(bool(libraries.find()), reason="this machine has a driver")
def test_run_changes_nothing_without_a_driver(script, tmp_path):
    path = script("import os\nprint(os.environ.get('LD_LIBRARY_PATH'))\n")
    expected = f"{os.environ.get('LD_LIBRARY_PATH')}\n"
    assert command("run", path, XDG_CACHE_HOME=str(tmp_path)).stdout == expected
    assert not list(tmp_path.glob("synkhronos*"))


def test_no_command_shows_the_help():
    answer = command()
    assert answer.returncode == 2
    assert "doctor" in answer.stdout


@pytest.fixture
def too_new_numpy(tmp_path):
    """Environment with a fake NumPy package of an unsupported, newer version."""
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
