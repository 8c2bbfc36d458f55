"""Tests on devices other than the CPU: ``pytest tests/gpu --device opencl0:0 --ranks 2``.

A process that has used a device cannot be forked any more, so there is one world a run: all its tests
share it, and those that ask for another one are skipped, with that reason.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import synkhronos as synk


def pytest_addoption(parser):
    parser.addoption("--device", help="a Theano device, such as cuda0 or opencl0:0; default: cuda0")
    parser.addoption("--ranks", type=int, default=2, help="how many ranks share the device")
    parser.addoption("--master-rank", type=int, default=0)


def device_of(config):
    """Return the device asked for; else the first GPU, or None where there is none."""
    return config.getoption("--device") or ("cuda0" if synk.get_n_gpu() else None)


def pytest_collection_modifyitems(config, items):
    if device_of(config) is None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="there is no GPU here, and no --device was given"))


@pytest.fixture(scope="session")
def devices(request):
    """The devices of this run, one a rank."""
    return [device_of(request.config)] * request.config.getoption("--ranks")


@pytest.fixture(scope="session")
def world(request, devices):
    """The one world of this run."""
    synk.fork(devices=devices, master_rank=request.config.getoption("--master-rank"))
    yield synk._world.current()
    if synk._world.exists():
        synk.close()


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
