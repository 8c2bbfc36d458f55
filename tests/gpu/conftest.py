"""Configuration of the tests on devices: ``pytest tests/gpu --device opencl0:0 --ranks 2``.

A process that has used a device can no longer fork workers, so each run has only one world. All tests
share it. Tests that need a different world are skipped, and the reason is reported.
"""

import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("EXAMPLES", "0.2")  # for the module `oracle`, as calls on devices are slow
# PoCL compiles each kernel when it is first used, on every rank. The tests use few elements, so that
# optimizing a kernel takes much longer than it saves: 10 s instead of 3 s for a matrix product.
os.environ.setdefault("POCL_EXTRA_BUILD_FLAGS", "-cl-opt-disable")
# If two processes build the same kernel in one cache, PoCL can fail with "Unknown error". Ranks have
# caches of their own, but in another process of pytest there are ranks with the same numbers.
_OWN_CACHE = None
if Path(os.environ.get("POCL_CACHE_DIR", "pocl-tests-")).name.startswith("pocl-tests-"):
    # Not the user's choice; it may be inherited from the process that has started this one.
    os.environ["POCL_CACHE_DIR"] = _OWN_CACHE = tempfile.mkdtemp(prefix="pocl-tests-")

import synkhronos as synk


def pytest_unconfigure():
    if _OWN_CACHE is not None:
        shutil.rmtree(_OWN_CACHE, ignore_errors=True)


def pytest_addoption(parser):
    parser.addoption("--device", help="a Theano device, such as cuda0 or opencl0:0; default: cuda0")
    parser.addoption("--ranks", type=int, default=2, help="how many ranks share the device")
    parser.addoption("--master-rank", type=int, default=0)


def device_of(config):
    """Return the device given on the command line, or else the first GPU, or None without a GPU."""
    return config.getoption("--device", None) or ("cuda0" if synk.get_n_gpu() else None)


def pytest_collection_modifyitems(config, items):
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = None
    if len(ours) < len(items):
        reason = "on devices, which no other tests can share a process with: pytest tests/gpu"
    elif device_of(config) is None:
        reason = "there is no GPU here, and no --device was given"
    for item in ours if reason else []:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def nothing_left():
    """Override of the fixture in ``tests/conftest.py``, as the world stays open until the end."""


@pytest.fixture
def in_python():
    """Override of the fixture in ``tests/conftest.py``: device operations have no Python code."""


@pytest.fixture(autouse=True)
def processes_of_their_own(monkeypatch):
    """Let processes that a test starts use devices.

    Theano sets the variable in a process that uses a device, and child processes inherit it.
    """
    monkeypatch.delenv("THEANO_GPU_IS_ALREADY_ACTIVE", raising=False)


@pytest.fixture(scope="session")
def devices(request):
    return [device_of(request.config)] * request.config.getoption("--ranks")


@pytest.fixture(scope="session")
def world(request, devices):
    """The only world of this run."""
    synk.fork(devices=devices, master_rank=request.config.getoption("--master-rank"))
    yield synk.world.world.current_world()
    if synk.world.world.world_exists():
        synk.close()
    assert not [one for one in multiprocessing.active_children() if "synk" in one.name]


@pytest.fixture(scope="module")
def open_world(world):
    """Function that skips the test unless this run's world has the given size and master rank."""

    def open_it(n_parallel, master_rank=0):
        if (n_parallel, master_rank) != (world.size, world.master_rank):
            pytest.skip(f"this run has {world.size} ranks, the master being {world.master_rank}")

    return open_it


@pytest.fixture
def world_of(open_world):
    return open_world
