"""Fixtures that open worlds and run programs, and the settings for the compiler."""

import collections
import faulthandler
import functools
import gc
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import compiler

compiler.set_flags(compiler.FLAGS)
os.environ.setdefault("SYNKHRONOS_PROGRESS", "0")  # what takes long depends on the machine
# Theano imports mpi4py. Some MPIs then load UCX, which writes to stderr when a process crashes.
os.environ.setdefault("UCX_ERROR_SIGNALS", "")

from processes import (  # noqa: F401
    ROOT,
    demo_programs,
    programs,
    run_demo,
    wait_briefly_for_the_compile_lock,
)

import synkhronos as synk
from checks.ranks import Ranks
from synkhronos.transports.local import LocalTransport
from specifications.transport import NaiveTransport

# After synkhronos, which has the compiler find a BLAS.
from compilers import NAME, default_mode
from environments import OF_BOTH, OF_PYTENSOR
from prelude import run_file

wait_briefly_for_the_compile_lock()


def pytest_addoption(parser):
    parser.addoption("--only", metavar="FILE", help="only the tests whose ids are lines of a file")


def pytest_configure(config):
    faulthandler.enable()


def pytest_ignore_collect(collection_path):
    """With PyTensor, leave out the tests of what only Theano has."""
    if NAME == "pytensor" and collection_path.name.startswith("test_"):
        return collection_path.name not in OF_BOTH or None
    return collection_path.name in OF_PYTENSOR and NAME != "pytensor" or None


def pytest_collection_modifyitems(config, items):
    """With ``--only``, select the tests that a file lists, as far as they exist."""
    if config.getoption("--only"):
        listed = set(Path(config.getoption("--only")).read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in listed])
        items[:] = [item for item in items if item.nodeid in listed]


def pytest_terminal_summary(terminalreporter):
    """Say what tests of several machines lacked, if there were any."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    names = {report.nodeid.split("::")[0] for report in reports if getattr(report, "nodeid", None)}
    paths = [ROOT / name for name in names if name.endswith(".py")]
    if any("from namespaces import" in path.read_text() for path in paths if path.exists()):
        import namespaces

        if namespaces.what_is_missing():
            terminalreporter.write_line(namespaces.what_is_missing(), yellow=True)
    if "TESTS_REPORT" in os.environ:  # for tests/tiers.py
        stats = terminalreporter.stats
        bad = [one.nodeid for kind in ("failed", "error") for one in stats.get(kind, ())]
        numbers = {name: len(stats.get(name, ())) for name in ("passed", "skipped")}
        seconds = collections.Counter()
        for report in itertools.chain.from_iterable(stats.values()):
            if hasattr(report, "duration"):
                seconds[report.nodeid.partition("::")[0]] += report.duration
        numbers.update({"failed": len(bad), "failed tests": bad, "seconds": seconds})
        Path(os.environ["TESTS_REPORT"]).write_text(json.dumps(numbers))


@pytest.fixture(scope="module")
def open_world():
    """A function that opens a world, closing the one before; all end with the module."""

    def open_it(n_parallel, **kwargs):
        if synk.world.world.world_exists():
            synk.close()
        synk.fork(n_parallel, use_gpu=False, **kwargs)

    yield open_it
    if synk.world.world.world_exists():
        synk.close()


@pytest.fixture
def world_of(open_world):
    """The same for one test."""
    yield open_world
    if synk.world.world.world_exists():
        synk.close()


@pytest.fixture
def two(world_of):
    """A world of two ranks for one test."""
    world_of(2)


@pytest.fixture(
    scope="module",
    params=[(make, size) for make in (NaiveTransport, LocalTransport) for size in (1, 3)],
    ids=lambda param: f"{param[0].__name__}-{param[1]}",
)
def ranks(request):
    """The ranks of each transport, for the checks of its store and its named memory."""
    make, size = request.param
    ranks = Ranks(make(size, size - 1, timeout=30))
    yield ranks
    ranks.close()


@pytest.fixture
def in_python():
    """Functions are built without C code, unless they have a mode: for tests of what they compute."""
    with default_mode("FAST_COMPILE"):
        yield


@pytest.fixture
def quiet_pymc():
    """PyMC and ArviZ warn of few draws, and announce later versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


@pytest.fixture
def noticed():
    """A function that returns the texts of all SynkhronosWarnings since it was last called."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", synk.SynkhronosWarning)

        def texts():
            found = [str(one.message) for one in caught]
            caught.clear()
            return found

        yield texts


@pytest.fixture
def in_threads(monkeypatch):
    """The ranks of worlds are threads: for tests of results, with ``in_python`` and a world per test.

    That takes two thirds of the processor time. But threads inherit nothing: each rank gets its own
    replicas as a pickle, which for functions with C code takes longer than a fork.
    """

    def make(machines, by_machine, master_rank, timeout, profile_workers):
        return NaiveTransport(len(by_machine[0]), master_rank, timeout)

    monkeypatch.setattr("synkhronos.world.launch._make_transport", make)


@pytest.fixture(autouse=True, scope="module")
def no_processes(request):
    """The tests in ``tests/unit`` fork nothing and start no Python; they may run the C compiler."""
    if request.path.parent.name != "unit":
        yield
        return

    def forbid(*args, **kwargs):
        raise AssertionError("a test that starts processes belongs to tests/system")

    started = subprocess.Popen.__init__

    def start(self, args, *others, **options):
        if sys.executable in args:
            forbid()
        started(self, args, *others, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fork", forbid)
        monkeypatch.setattr(subprocess.Popen, "__init__", start)
        yield


@pytest.fixture(autouse=True, scope="module")
def nothing_left():
    """No process of a world is there after a module's tests.

    What is there before them is left out of garbage collections: imported modules, and Theano's list of
    all modules that it has compiled. In a world whose ranks are threads, every dropped function causes
    a collection on each rank.
    """
    gc.collect()
    gc.freeze()
    yield
    assert not [child for child in multiprocessing.active_children() if "synk" in child.name]


@pytest.fixture
def run_python(tmp_path):
    """`prelude.run_file`, in ``tmp_path``."""
    return functools.partial(run_file, cwd=tmp_path)
