"""Tests on devices other than the CPU: ``pytest tests/gpu --device opencl0:0 --ranks 2``.

A process that has used a device cannot be forked any more, so there is one world a run: all its tests
share it, and those that ask for another one are skipped, with that reason.
"""

import multiprocessing
import os
from pathlib import Path

import pytest

os.environ.setdefault("EXAMPLES", "0.2")  # a call on a device is slow; read by the module `oracle`

import synkhronos as synk


def pytest_addoption(parser):
    parser.addoption("--device", help="a Theano device, such as cuda0 or opencl0:0; default: cuda0")
    parser.addoption("--ranks", type=int, default=2, help="how many ranks share the device")
    parser.addoption("--master-rank", type=int, default=0)


def device_of(config):
    """Return the device asked for; else the first GPU, or None where there is none."""
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
    """In place of the look of this name after each module: this world lives on until the end."""


@pytest.fixture
def in_python():
    """In place of the fixture of this name elsewhere: operations on devices have no Python code."""


@pytest.fixture(autouse=True)
def processes_of_their_own(monkeypatch):
    """Processes that a test starts may use devices: Theano tells them not to once this one has."""
    monkeypatch.delenv("THEANO_GPU_IS_ALREADY_ACTIVE", raising=False)


@pytest.fixture(scope="session")
def devices(request):
    """The devices of this run, one per rank."""
    return [device_of(request.config)] * request.config.getoption("--ranks")


@pytest.fixture(scope="session")
def world(request, devices):
    """The one world of this run."""
    synk.fork(devices=devices, master_rank=request.config.getoption("--master-rank"))
    yield synk.world.world.current_world()
    if synk.world.world.world_exists():
        synk.close()
    assert not [one for one in multiprocessing.active_children() if "synk" in one.name]


@pytest.fixture(scope="module")
def open_world(world):
    """As the fixture of this name elsewhere, for the one world that there is."""

    def open_it(n_parallel, master_rank=0):
        if (n_parallel, master_rank) != (world.size, world.master_rank):
            pytest.skip(f"this run has {world.size} ranks, the master being {world.master_rank}")

    return open_it


@pytest.fixture
def world_of(open_world):
    """The same."""
    return open_world
