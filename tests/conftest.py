"""What tests share: worlds that end, and a look at what they leave behind."""

import faulthandler
import multiprocessing
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent

# A cache of compiled code for all programs of a run, apart from the user's own: one per process of
# pytest, as processes that compile at once would wait for each other. The compiler takes most of the
# time of the tests, and takes twice as long with debug information and -O3.
_PART = "device" if "--device" in str(sys.argv) else "main"
_CACHE = f"tests-{os.environ.get('PYTEST_XDIST_WORKER', _PART)}"
_KIND = "compiledir_%(short_platform)s-%(processor)s-%(python_version)s-%(python_bitwidth)s"
_FLAGS = f"compiledir_format={_KIND}-{_CACHE},compile.wait=1,gcc.cxxflags=-g0 -O1"
os.environ["THEANO_FLAGS"] = ",".join(filter(None, [os.environ.get("THEANO_FLAGS"), _FLAGS]))

from processes import programs, wait_briefly_for_the_compile_lock  # noqa: F401

import synkhronos as synk
import theano

wait_briefly_for_the_compile_lock()


def pytest_configure(config):
    faulthandler.enable()


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
def in_python(monkeypatch):
    """Functions are built without C code, unless they have a mode: for tests of what they compute."""
    fast_compile = theano.compile.get_mode("FAST_COMPILE")
    monkeypatch.setattr(theano.compile.mode, "instantiated_default_mode", fast_compile)


@pytest.fixture(autouse=True, scope="module")
def nothing_left():
    """No process of a world is there after a module's tests."""
    yield
    assert not [child for child in multiprocessing.active_children() if "synk" in child.name]


@pytest.fixture
def run_python(tmp_path):
    """A function that runs code as a script of its own, and looks at what it leaves behind.

    Returns the ``subprocess.CompletedProcess``. The script has a time limit and dumps its traceback
    as it runs out of time.
    """

    def run(code, *arguments, timeout=120, check=True, environment=None):
        script = tmp_path / "script.py"
        script.write_text(
            f"import faulthandler; faulthandler.dump_traceback_later({timeout - 5}, exit=True)\n"
            + textwrap.dedent(code)
        )
        done = subprocess.run(
            [sys.executable, str(script), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        )
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        left = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
        assert not [cmdline for cmdline in left if str(script) in cmdline]
        return done

    return run
