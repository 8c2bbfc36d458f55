"""Tests of how Theano is made importable, repaired and configured, and which BLAS is found."""

import importlib
import importlib.util
import multiprocessing.process
import re
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from prelude import run_file
from processes import own_process, PYTHONPATH, ROOT

from synkhronos.host import environment, imports
import numpy as np


@pytest.fixture
def run(tmp_path):
    """Function that runs a program, and returns what it prints.

    The program runs without settings of Theano and of mpi4py other than the given environment variables.
    """

    def run_it(program, *arguments, **variables):
        unset = {"THEANO_FLAGS": None, "THEANORC": str(tmp_path / "no-theanorc")}
        unset.update(dict.fromkeys(environment.MPI_VARIABLES))  # this process has set them
        variables = {**unset, **variables}
        done = run_file(program, *arguments, cwd=tmp_path, timeout=60, environment=variables)
        return done.stdout.strip()

    return run_it


@pytest.mark.parametrize("version", [(3, 7, 9), (3, 15, 0), (2, 7, 18)])
def test_other_python_versions_are_named_with_what_is_expected(version):
    complaint = environment.python_complaint(version, "theano")
    if version < (3, 8):
        assert environment.python_complaint(version) == complaint and "Python 3.8 or newer" in complaint
    else:
        assert "Python 3.8 to 3.14" in complaint
    for way in ("'uv venv --python 3.13'", "'python:3.13'", "Debian 13"):
        assert way in complaint
    assert ".".join(map(str, version)) in complaint


@pytest.mark.parametrize("version", ["1.19.5", "1.20.0", "1.22.4", "3.0.0rc1", "3.1.0"])
def test_other_numpy_versions_are_named_with_the_remedy(version):
    complaint = environment.numpy_complaint(version)
    assert version in complaint
    assert complaint.endswith("To fix this: python -m synkhronos install")


@pytest.mark.parametrize(
    "version, what",
    [("3.7.16", "import"), ("3.7.16", "setup.py"), ("3.15.1", "import"), ("3.16.0", "import")],
)
def test_another_python_is_one_sentence_from_the_import_and_from_the_setup(run_python, version, what):
    done = run_python("other_python.py", version, what, check=False)
    sentence = environment.python_complaint(tuple(map(int, version.split("."))), "theano")
    lines = done.stderr.splitlines()
    assert lines[-1] == ("ImportError: " if what == "import" else "") + sentence
    assert what == "import" or done.stderr.count("\n") == 1
    assert done.returncode == 1 and done.stdout == ""


@pytest.mark.parametrize("value", [None, "1"])
def test_importing_theano_does_not_start_mpi_unless_the_user_asks_for_it(run, tmp_path, value):
    """Theano imports mpi4py if it is installed, which calls MPI_Init by default."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    (tmp_path / "mpi4py" / "MPI.py").write_text(
        "import os\nprint(*[os.environ[f'MPI4PY_RC_{name}'] for name in ('INITIALIZE', 'FINALIZE')])\n"
        "COMM_WORLD = None\n"
    )
    chosen = {} if value is None else {"MPI4PY_RC_INITIALIZE": value}
    printed = run("imports.py", "synkhronos", PYTHONPATH=f"{tmp_path}:{ROOT}", **chosen)
    assert printed.splitlines()[0] == f"{value or 0} 0"


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_theano_with_mpi4py_does_not_initialize_mpi_and_a_forked_child_can_end(run):
    """With MPI initialized, the child would wait in MPI_Finalize for ever."""
    assert run("theano_with_mpi.py") == "False 3"


def test_importing_with_a_numpy_that_is_too_new_is_an_error_of_one_sentence(run):
    sentence, theano_imported = run("numpy_too_new.py").splitlines()
    assert "got NumPy 3.0.0" in sentence
    assert theano_imported == "False"


def test_the_library_can_be_imported_after_an_import_of_theano_that_has_failed(run):
    """Theano's second attempt would end with AttributeError: This name is already taken."""
    assert run("failed_import.py").splitlines()[-1] == "42.0"


@pytest.mark.parametrize(
    ("settings", "flags", "expected"),
    [
        ("[blas]\nldflags = -lmine\n", "device=cpu", "-lmine"),
        ("[global]\nfloatX = float32\n", "blas.ldflags=-lmine", "-lmine"),
        ("[global]\nfloatX = float32\n", "device=cpu", environment.find_ldflags()),
    ],
)
def test_blas_is_that_of_the_user_if_there_is_one(run, tmp_path, settings, flags, expected):
    (tmp_path / "theanorc").write_text(settings)
    variables = {"THEANO_FLAGS": flags, "THEANORC": f"{tmp_path}/none:{tmp_path}/theanorc"}
    assert run("imports.py", "synkhronos", "theano", **variables) == expected


def test_flags_that_a_script_sets_before_theano_is_imported_have_an_effect(run_python):
    variables = {**imports.variables({"PYTHONPATH": PYTHONPATH}), "THEANORC": "none"}
    done = run_python("flags_in_script.py", environment=variables)
    assert done.stdout.split() == ["float32", environment.find_ldflags()] and not done.stderr


def test_flags_that_a_script_sets_too_late_are_named(run_python):
    done = run_python("flags_in_script.py", "synkhronos")
    assert "THEANO_FLAGS has no effect for floatX=float32: Theano has read its flags" in done.stderr


def test_the_systems_openblas_is_preferred(tmp_path, monkeypatch):
    (tmp_path / "libopenblas.so").touch()
    monkeypatch.setattr(environment, "library_folders", lambda: ([tmp_path], []))
    assert environment.find_ldflags() == "-lopenblas"


def test_theano_imported_before_does_no_harm(run):
    """Python repairs Theano from its start, as in a script that ``python -m synkhronos run`` starts."""
    from_start = imports.variables({"PYTHONPATH": str(ROOT)})
    flags = "blas.ldflags=-lopenblas"
    assert run("imports.py", "theano", "synkhronos", THEANO_FLAGS=flags, **from_start) == "-lopenblas"


@pytest.mark.skipif(environment.scipy_openblas() is None, reason="this SciPy has no OpenBLAS of its own")
def test_theano_computes_with_the_openblas_inside_scipy(run):
    assert run("matrix_product.py", "scipy") == "64.0"


def test_importing_theano_for_the_cpu_takes_nothing_of_a_gpu(run, tmp_path):
    # This needs a separate compile cache. Theano imports the dependencies of the modules in its cache,
    # and these include pygpu once anything has been compiled for a device.
    run("nothing_of_a_gpu.py", THEANO_FLAGS=f"base_compiledir={tmp_path}/cache")


@pytest.mark.parametrize(
    ("described", "version"),
    [("Theano_PyMC-1.1.2.dist-info", "1.1.2"), ("theano_pymc-1.0.11-py3.8.egg-info", "1.0.11")],
)
def test_theano_pymc_in_the_place_of_theano_is_named_with_the_remedy(tmp_path, described, version):
    (tmp_path / "theano" / "gof").mkdir(parents=True)
    assert environment.theano_complaint([tmp_path / "theano"]) is None
    (tmp_path / described).mkdir()
    complaint = environment.theano_complaint([tmp_path / "theano"])
    assert f"got Theano-PyMC {version}, " in complaint and str(tmp_path / "theano") in complaint
    assert "pip uninstall Theano-PyMC Theano" in complaint
    assert complaint.endswith("python -m synkhronos install")


@pytest.mark.parametrize("name", ["theano", "numpy"])
def test_a_file_beside_the_script_in_the_place_of_a_package_is_named(run_python, tmp_path, name):
    (tmp_path / f"{name}.py").touch()
    script = tmp_path / "script.py"
    script.write_text("import synkhronos")
    done = run_python(script, check=False, environment={"THEANORC": "none"})
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ImportError")]
    assert f"{name}.py is imported in place of the package {name}" in line and "rename" in line


def test_theano_pymc_is_one_sentence_from_the_import(run, tmp_path):
    (tmp_path / "theano").mkdir()
    (tmp_path / "theano" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "Theano_PyMC-1.1.2.dist-info").mkdir()
    printed = run("error_of_import.py", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert printed.startswith("ImportError: Synkhronos needs Theano 1.0.5, and got Theano-PyMC 1.1.2")


def test_every_environment_variable_is_described():
    described = (ROOT / "docs" / "environment.rst").read_text()
    code = "".join(path.read_text() for path in (ROOT / "synkhronos").rglob("*.py"))
    names = set(re.findall(r"SYNKHRONOS_[A-Z_]+", code))
    assert len(names) >= 3
    assert names <= set(re.findall(r"SYNKHRONOS_[A-Z_]+", described))


if importlib.util.find_spec("lasagne") is None:
    pytest.skip("the tests need lasagne", allow_module_level=True)

DOWNSAMPLE = "theano.tensor.signal.downsample"


@own_process
def test_lasagne_can_be_imported_and_does_not_warn():
    import theano
    import theano.tensor as tt

    assert not {"lasagne", DOWNSAMPLE} & {*sys.modules}  # neither Theano nor we import them
    warnings.simplefilter("error", UserWarning)
    import lasagne
    from lasagne import layers

    x = tt.dtensor4("x")
    network = layers.InputLayer((None, 1, 6, 8), x)
    pooled = layers.MaxPool2DLayer(network, (3, 2), stride=(2, 1), pad=(1, 0))
    summed = layers.Pool2DLayer(network, (2, 2), mode="average_inc_pad")
    filtered = layers.Conv2DLayer(network, 1, 3, W=lasagne.init.Constant(1.0), nonlinearity=None)
    outputs = [layers.get_output(one) for one in (pooled, summed, filtered)]
    f = theano.function([x], outputs, mode=theano.Mode("cvm", "fast_compile"))
    image = np.random.RandomState(1).normal(size=(6, 8))
    largest, mean, total = (one[0, 0] for one in f(image[None, None]))
    bordered = np.pad(image, ((1, 1), (0, 0)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view
    np.testing.assert_array_equal(largest, windows(bordered, (3, 2)).max(axis=(2, 3))[::2])
    np.testing.assert_allclose(mean, windows(image, (2, 2)).mean(axis=(2, 3))[::2, ::2])
    np.testing.assert_allclose(total, windows(image, (3, 3)).sum(axis=(2, 3)))


REPLACED = [row for row in imports.read_table() if not row.file]


@pytest.mark.parametrize("row", REPLACED, ids=lambda row: f"{row.modules}: {row.old!r:.40}")
def test_each_repair_finds_its_text_and_keeps_the_line_numbers(row):
    is_module = not row.modules.endswith(".c")
    assert row.why and (row.old.count("\n") == row.new.count("\n") or not is_module)
    for name in row.modules.split():
        if importlib.util.find_spec(re.split("[./]", name)[0]) is None:
            pytest.skip(f"{name} is not installed")
        text = file_of(name).read_text()
        assert row.old in text


def file_of(name):
    """Return the file of a module as it is installed. No package is imported."""
    package, *others = re.sub(r"\.c$", "", name).replace("/", ".").split(".")
    folder = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    file = folder.joinpath(*others)
    return file / "__init__.py" if file.is_dir() else file.with_suffix(".c" if "/" in name else ".py")


def test_the_c_code_of_gpu_operations_is_the_same_in_each_process():
    """Else two compiled modules can get the same key, of which Theano warns in each later process."""
    from theano.gpuarray.type import gpu_context_type

    assert str(gpu_context_type) == "GpuContextType"


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A module that needs repairs, and a function that returns its loader with some repairs."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    file = tmp_path / "broken.py"
    file.write_text("first = np.product\nsecond = 2\nthird = np.product\n")

    def load(*pairs):
        rows = [imports.Repair("broken", "a test", *pair) for pair in pairs]
        loader = imports.RepairingLoader("broken", str(file), rows)
        module = ModuleType("broken")
        module.np = np
        exec(loader.get_code("broken"), vars(module))
        return module

    return load


def test_other_repairs_do_not_run_the_bytecode_of_former_ones(broken, tmp_path):
    replaced = ("np.product", "np.prod")
    assert broken(replaced).second == 2
    assert broken(replaced, ("second = 2", "second = 3")).second == 3
    assert broken(replaced).second == 2
    names = {path.name for path in (tmp_path / "__pycache__").iterdir()}
    assert len(names) == 2 and all(".repaired-" in name for name in names)


@own_process
def test_numpy_is_not_changed_for_scripts():
    before = dict(vars(np))
    import lasagne.layers  # noqa: F401
    import theano.tensor.nnet  # noqa: F401

    changed = {name for name, value in vars(np).items() if value is not before.get(name)}
    assert not [name for name in changed if not isinstance(getattr(np, name), ModuleType)]


def test_theano_shows_that_it_compiles_also_to_those_who_call_it_within_theano():
    names = ("theano.compile.function_module", "theano.compile.pfunc")
    shown, same = (importlib.import_module(name).orig_function for name in names)
    assert shown is same and shown.__wrapped__.__name__ == "orig_function"


def test_only_the_process_of_the_script_shows_that_theano_compiles(monkeypatch, capsys):
    progress = importlib.import_module("theano.compat.progress")
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    compiled = progress.shown(lambda inputs, outputs: time.sleep(0.2))
    compiled([], [])
    assert "compiling theano.function 1" in capsys.readouterr().err
    monkeypatch.setattr(multiprocessing.process, "parent_process", lambda: "the master")
    progress.shown(lambda inputs, outputs: time.sleep(0.2))([], [])
    assert capsys.readouterr().err == ""


def test_the_finder_of_the_start_stays_the_only_one(monkeypatch):
    at_start = type("Finder", (imports.Finder,), {})  # of the same file, which Python ran before
    monkeypatch.setattr(sys, "meta_path", [at_start])
    imports.provide()
    assert sys.meta_path == [at_start]
