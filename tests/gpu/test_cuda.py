"""What needs CUDA, in processes of their own: cuDNN, ResNet-50, NCCL. The rest runs on any device."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

import synkhronos as synk

ASK_FOR_CUDNN = """
import synkhronos as synk

synk.fork(devices=["{device}"])
from theano.gpuarray import dnn

print("dnn:", dnn.dnn_available(None), dnn.dnn_available.msg)
"""

PATH = f"{ROOT}:{ROOT / 'tests'}"
RESNET = ROOT / "demos" / "resnet" / "train_resnet.py"


@pytest.fixture
def cuda(devices):
    if not devices[0].startswith("cuda"):
        pytest.skip(f"{devices[0]} is no CUDA device")
    return devices[0]


@pytest.fixture
def many(cuda):
    """The devices of all GPUs; two of them at least."""
    number = synk.get_n_gpu()
    if number < 2:
        pytest.skip(f"{number} GPU here; this needs two")
    return [f"cuda{one}" for one in range(number)]


@pytest.fixture
def run_code(run_python):
    def run(code, **environment):
        return run_python(code, timeout=500, environment={"PYTHONPATH": PATH, **environment})

    return run


@pytest.mark.slow
def test_conv_pooling_and_batch_norm_without_cudnn(run_code, devices):
    run_code(f"from gpu.networks import check; check({devices!r}, False)")


def test_conv_pooling_and_batch_norm_with_cudnn(run_code, cuda, devices):
    asked = run_code(ASK_FOR_CUDNN.format(device=cuda))
    if "dnn: True" not in asked.stdout:
        pytest.skip(f"Theano cannot use cuDNN here: {asked.stdout} {asked.stderr[-300:]}")
    run_code(f"from gpu.networks import check; check({devices!r}, True)")


def test_steps_of_resnet_50_equal_the_serial_ones(cuda, devices):
    done = subprocess.run(
        [sys.executable, RESNET, "--small", "--compare", "--devices", *devices],
        capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("50", done.stdout)


def test_nccl_conforms_on_all_gpus(run_code, many):
    done = run_code(f"from gpu.conform import conform; conform('nccl', {many!r})")
    assert "passed" in done.stdout and "failed" not in done.stdout, done.stdout + done.stderr


ASK_FOR_NCCL = """
import sys
import numpy as np
import synkhronos as synk

devices = sys.argv[1:]
n = synk.fork(devices=devices)
import theano, theano.tensor as tt

nccl = type(synk.world.world.current_world().here.comm).__name__ == "NcclCommunicator"
x = tt.fmatrix("x")
w = theano.shared(np.ones((3, 2), "float32"))
f = synk.function([x], [(tt.dot(x, w).sum(axis=0), "sum"), (x, "gather")], updates=[(w, w * 2)])
for length in (2 * n + 1, 1):
    before = w.get_value()[0, 0]
    total, gathered = f(np.ones((length, 3), "float32"), num_slices=2)
    assert gathered.shape == (length, 3)
    assert np.allclose(total, 3 * length * before), total
for rank in range(n):
    synk.set_value(rank, w, np.full((3, 2), rank + 1, "float32"))
for use_nccl in (True, False):
    reduced = synk.reduce(w, "sum", in_place=False, nccl=use_nccl)
    assert (reduced == n * (n + 1) / 2).all(), reduced
synk.all_reduce(w, "avg", weights=range(n))
assert np.allclose(w.get_value(), sum(r * (r + 1) for r in range(n)) / sum(range(n)))
print("NCCL" if nccl else "no NCCL")
"""


def test_collectives_are_right_with_nccl_on_all_gpus(run_python, many):
    done = run_python(ASK_FOR_NCCL, *many, timeout=300)
    assert done.stdout.splitlines()[-1] == "NCCL", done.stderr


@pytest.mark.parametrize("try_nccl", ["0", "1"])
def test_ranks_that_share_a_device_compute_and_reduce(run_python, devices, try_nccl):
    """With the option set NCCL may still refuse; then, as without it, one line says why."""
    environment = {"SYNKHRONOS_NCCL_SHARED_GPU": try_nccl}
    done = run_python(ASK_FOR_NCCL, devices[0], devices[0], timeout=300, environment=environment)
    notes = [line for line in done.stderr.splitlines() if "shared memory, not NCCL" in line]
    with_nccl = done.stdout.splitlines()[-1] == "NCCL"
    assert len(notes) == (0 if with_nccl else 1), done.stderr
    if devices[0].startswith("cuda") and try_nccl == "0":
        assert not with_nccl and "SYNKHRONOS_NCCL_SHARED_GPU=1" in notes[0]


FALL_BACK = """
import sys
from synkhronos.world import devices as _devices

# This device as CUDA's, so that joining by NCCL is tried; it is OpenCL's, so that it fails.
_devices.kind_of = lambda device: "cuda"
""" + ASK_FOR_NCCL


def test_a_world_that_cannot_join_by_nccl_says_so_once_and_goes_over_the_cpu(run_python, devices):
    if devices[0].startswith("cuda"):
        pytest.skip("NCCL may succeed on CUDA")
    environment = {"SYNKHRONOS_NCCL_SHARED_GPU": "1"}
    done = run_python(FALL_BACK, devices[0], devices[0], timeout=300, environment=environment)
    assert done.stdout.splitlines()[-1] == "no NCCL"
    notes = [line for line in done.stderr.splitlines() if "shared memory, not NCCL" in line]
    assert len(notes) == 1 and "rank 0: " in notes[0], done.stderr
