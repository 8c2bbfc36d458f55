"""Tests of ``install``, with a pip that writes down its calls, and of what the code requires."""

import ast
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest
from prelude import run_file
from processes import ROOT, run_interpreter

from synkhronos.__main__ import main
from synkhronos.host import environment, installation

PIP = """
import configparser, json, os, sys

path = os.environ["PYTHONPATH"].split(os.pathsep)
parser = configparser.ConfigParser
has_names = hasattr(configparser, "SafeConfigParser") and hasattr(parser, "readfp")
call = {"arguments": sys.argv[1:], "path": path, "has_names": has_names}
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(call) + "\\n")
sys.exit(int(os.environ["STATUS"]))
"""
NUMPY, SCIPY, *OTHERS = installation.WHEELS["theano"]


@pytest.fixture
def packages(tmp_path):
    """A folder with a pip and a Theano that take the place of the installed ones."""
    for name in ("pip", "theano"):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").touch()
    (tmp_path / "packages" / "pip" / "__main__.py").write_text(PIP)
    (tmp_path / "packages" / "theano" / "gof").mkdir()
    return tmp_path / "packages"


@pytest.fixture
def install(packages, tmp_path):
    """Function that runs the command, and returns the completed process and the calls of pip.

    Theano and Lasagne are installed in the given versions, and pip ends with the given exit status.
    """

    def run(*arguments, theano="1.0.4", lasagne="0.0", status=0):
        for name, version in (("Theano", theano), ("Lasagne", lasagne)):
            described = packages / f"{name}-{version}.dist-info"
            described.mkdir()
            (described / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        calls = tmp_path / "calls"
        path = os.pathsep.join([str(packages), str(ROOT)])
        variables = {"CALLS": str(calls), "STATUS": str(status), "PYTHONPATH": path}
        words = "-m", "synkhronos", "install", *arguments
        done = run_interpreter(*words, code=None, environment=variables)
        return done, [json.loads(line) for line in calls.read_text().splitlines()]

    return run


def arguments_of(calls):
    """Return the arguments of pip, without those that are always the same."""
    start = ["--disable-pip-version-check", "install"]
    assert all(call["arguments"][:2] == start for call in calls)
    return [call["arguments"][2:] for call in calls]


def test_theano_is_built_with_what_its_setup_needs(install):
    done, calls = install()
    assert done.returncode == 0, done.stderr
    wheels, tools, build = arguments_of(calls)
    assert wheels == [NUMPY, SCIPY, *OTHERS]
    folder = tools[1]
    assert tools == ["--target", folder, *installation.BUILD_TOOLS]
    assert build == ["--no-build-isolation", "--no-deps", "Theano==1.0.5"]
    before, also_before, while_built = (call["path"] for call in calls)
    assert before == also_before and while_built == [folder, *before]
    assert calls[2]["has_names"] and not Path(folder).exists()


def test_lasagne_and_keras_are_installed_with_theano(install):
    done, calls = install("keras", "lasagne")
    wheels, _, build = arguments_of(calls)
    of_theano, of_lasagne, of_keras = (installation.WHEELS[name] for name in installation.NAMES)
    assert done.returncode == 0 and wheels == [*of_theano, *of_lasagne, *of_keras]
    assert build[-2:] == ["Theano==1.0.5", "Lasagne==0.1"]


def test_every_call_of_pip_gets_the_constraints(install):
    done, calls = install("--constraint", "a.txt", "theano", "--constraint", "b.txt")
    assert len(calls) == 3
    for one in arguments_of(calls):
        assert " --constraint a.txt --constraint b.txt " in f" {' '.join(one)} "


def test_a_failure_of_pip_ends_the_command_with_its_exit_status(install):
    done, calls = install(status=7)
    assert done.returncode == 7 and len(calls) == 1
    assert done.stderr == "pip failed, with the exit status 7\n"


def test_a_theano_that_cannot_be_imported_is_reported(install, packages):
    (packages / "theano" / "__init__.py").write_text("raise RuntimeError('broken')")
    done, calls = install()
    assert done.returncode == 1 and "RuntimeError: broken" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Theano is installed, but importing it fails") and "doctor" in last


def test_an_unknown_name_is_an_error_that_lists_the_names(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["install", "theano", "tensorflow"])
    assert raised.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("error: expected one or more of theano, lasagne, keras, got tensorflow")


def test_the_systems_python_is_refused_with_the_remedy(tmp_path, monkeypatch, capsys):
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.delenv("PIP_BREAK_SYSTEM_PACKAGES", raising=False)
    assert main(["install"]) == 1
    said = capsys.readouterr()
    assert "make a virtual environment first: python3 -m venv env" in said.err and not said.out


def test_theano_pymc_must_be_removed_first(monkeypatch):
    versions = {"pip": "24.0", "Theano-PyMC": "1.1.2"}
    monkeypatch.setattr(installation, "installed_version", versions.get)
    assert "python -m pip uninstall Theano-PyMC Theano" in installation.complaint()


def test_a_python_without_theano_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 15, 0))
    assert installation.complaint() == environment.python_complaint((3, 15, 0), "theano")


def test_the_command_starts_where_nothing_is_installed(tmp_path):
    """There is no pip either, which is reported."""
    variables = {"PIP_BREAK_SYSTEM_PACKAGES": "1", "PYTHONPATH": str(ROOT)}
    words = "-S", "-m", "synkhronos", "install"
    done = run_interpreter(*words, code=1, cwd=tmp_path, environment=variables)
    assert done.stderr.startswith("There is no pip for this Python, ")


def test_importing_the_library_without_theano_names_the_command(tmp_path):
    done = run_file("error_of_import.py", "theano", "pytensor", cwd=tmp_path)
    assert done.stdout == (
        "ImportError: Synkhronos needs Theano 1.0.5, and no Theano is installed. To fix this: "
        "python -m synkhronos install\n"
    )


@pytest.mark.parametrize("file", ["theano", "library", "keras"])
def test_the_command_installs_what_the_extras_require(file):
    lines = (ROOT / "requirements" / f"{file}.in").read_text().lower().splitlines()
    required = {line.partition(";")[0] for line in lines if not line.startswith("#")} - {"theano==1.0.5"}
    wheels = [one.lower() for name in ("theano", "keras") for one in installation.WHEELS[name]]
    assert required and required <= set(wheels)


def test_the_versions_that_are_built_are_those_that_are_tested():
    tested = "".join(path.read_text() for path in (ROOT / "requirements").glob("*.txt")).splitlines()
    for package, version in installation.SOURCES.values():
        assert f"{package}=={version}" in tested


PACKAGES = {"PIL": "pillow", "lasagne": "Lasagne", "sklearn": "scikit-learn"}  # by import name
FOLDERS = ["synkhronos", "demos", "tests", "benchmarks"]
OUR_OWN = {
    "synkhronos",
    "setup",
    "of_the_script",
    *(path.stem for one in FOLDERS for path in (ROOT / one).rglob("*")),
}
BY_DEBIAN = {"pygpu"}
OF_CLUSTERS = {"ray"}  # a script that starts a job on a cluster runs where the cluster is installed


def imported_in(folder):
    """Return the top-level names that the code in a folder imports."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(one.name.partition(".")[0] for one in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.partition(".")[0])
    return found


def declared():
    """Return the requirements, and those of each extra, as ``pyproject.toml`` names their files."""
    toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    dynamic = toml.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]

    def read(listed):
        lines = "".join((ROOT / file).read_text() for file in listed["file"]).splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    extras = {name: read(files) for name, files in dynamic["optional-dependencies"].items()}
    return read(dynamic["dependencies"]), extras


@pytest.mark.skipif(sys.version_info < (3, 10), reason="the names of Python's own modules are needed")
@pytest.mark.parametrize("folder", ["synkhronos", "demos", "tests"])
def test_what_is_imported_can_be_installed(folder):
    required, extras = declared()
    used = extras.keys() - {"bench", "loading"}  # these are not needed to use or to test the library
    wanted = [*required, *(one for name in used for one in extras[name])]
    names = {re.match(r"[\w-]+", one).group().lower() for one in wanted} | BY_DEBIAN | OF_CLUSTERS
    imported = imported_in(folder) - sys.stdlib_module_names - OUR_OWN
    assert imported and {PACKAGES.get(one, one).lower() for one in imported} <= names


OLDEST = "3.8"
CODE = ["setup.py", "synkhronos", "demos", "tests"]
NOT_ON_OLDEST = [
    "sys.stdlib_module_names",  # the test that needs it is skipped there
    "tempfile.TemporaryDirectory(ignore_cleanup_errors)",  # mutation testing is not among the tests
    "tomllib",  # tomli is used there
    "file",  # vermin takes a package's file attribute for a type of Python 2
]


def newer_than_oldest(paths):
    """Return what vermin, which knows when each name was added to Python, finds; empty if nothing."""
    if importlib.util.find_spec("vermin") is None:
        pytest.skip("the test needs vermin")
    excluded = [option for name in NOT_ON_OLDEST for option in ("--exclude", name)]
    words = ["-c", "import vermin; vermin.main()", f"--target={OLDEST}-", "--violations", "--no-tips"]
    words += ["--backport", "typing_extensions", *excluded, *paths]
    done = run_interpreter(*words, code=None, cwd=ROOT, timeout=200)
    assert not done.stderr and "File with incompatible versions" not in done.stdout
    return done.stdout if done.returncode else ""


@pytest.mark.slow
def test_the_code_uses_nothing_newer_than_the_oldest_python():
    found = newer_than_oldest(CODE)
    assert not found, found
