"""Tests of cuDNN, ResNet-50 and NCCL in separate processes. Most of them need CUDA devices."""

import re
from pathlib import Path

import pytest
from processes import ROOT, run_interpreter

import synkhronos as synk

from .test_gpu_communicators import NAMES

PROGRAMS = Path(__file__).with_name("programs")
ASK_FOR_NCCL = PROGRAMS / "ask_for_nccl.py"
RESNET = ROOT / "demos" / "resnet" / "train_resnet.py"


@pytest.fixture
def cuda(devices):
    if not devices[0].startswith("cuda"):
        pytest.skip(f"{devices[0]} is no CUDA device")
    return devices[0]


@pytest.fixture
def many(cuda):
    number = synk.get_n_gpu()
    if number < 2:
        pytest.skip(f"{number} GPU here; this needs two")
    return [f"cuda{one}" for one in range(number)]


@pytest.mark.slow
def test_conv_pooling_and_batch_norm_without_cudnn(run_python, devices):
    run_python(PROGRAMS / "run_module.py", "networks", "no cudnn", *devices, timeout=500)


def test_conv_pooling_and_batch_norm_with_cudnn(run_python, cuda, devices):
    asked = run_python(PROGRAMS / "ask_for_cudnn.py", cuda, timeout=500)
    if "dnn: True" not in asked.stdout:
        pytest.skip(f"Theano cannot use cuDNN here: {asked.stdout} {asked.stderr[-300:]}")
    run_python(PROGRAMS / "run_module.py", "networks", "cudnn", *devices, timeout=500)


def test_resnet_50_trains_and_is_compared_with_plain_theano(cuda, devices):
    words = RESNET, "--small", "--compare", "--devices", *devices
    done = run_interpreter(*words, timeout=900, cwd=ROOT)
    assert "50 layers" in done.stdout
    assert re.search(r"process\(es\) are [0-9.]+ times as fast as one of plain", done.stdout)


def test_nccl_conforms_on_all_gpus(run_python, many):
    done = run_python(PROGRAMS / "run_module.py", "conform", "nccl", *many, timeout=500)
    passed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("passed")]
    assert passed == [*NAMES, "check_unequal_dtypes"], done.stdout + done.stderr


def test_collectives_are_right_with_nccl_on_all_gpus(run_python, many):
    done = run_python(ASK_FOR_NCCL, *many, timeout=300)
    assert done.stdout.splitlines()[-1] == "NCCL", done.stderr


@pytest.mark.parametrize("try_nccl", ["0", "1"])
def test_ranks_that_share_a_device_compute_and_reduce(programs, tmp_path, devices, try_nccl):
    """Check that one line explains why NCCL is not used.

    NCCL may refuse to share a GPU even if the option is set.
    """
    environment = {"SYNKHRONOS_NCCL_SHARED_GPU": try_nccl}
    done = programs.run_script(
        ASK_FOR_NCCL, devices[0], devices[0], timeout=300, cwd=tmp_path, environment=environment
    )
    notes = [line for line in done.stderr.splitlines() if "shared memory, not NCCL" in line]
    with_nccl = done.stdout.splitlines()[-1] == "NCCL"
    assert len(notes) == (0 if with_nccl else 1), done.stderr
    if devices[0].startswith("cuda") and try_nccl == "0":
        assert not with_nccl and "SYNKHRONOS_NCCL_SHARED_GPU=1" in notes[0]


def test_a_world_that_cannot_join_by_nccl_says_so_once_and_goes_over_the_cpu(
    programs, tmp_path, devices
):
    if devices[0].startswith("cuda"):
        pytest.skip("NCCL may succeed on CUDA")
    environment = {"SYNKHRONOS_NCCL_SHARED_GPU": "1"}
    arguments = ["--as-cuda", devices[0], devices[0]]  # the ranks try to join by NCCL, and fail
    done = programs.run_script(
        ASK_FOR_NCCL, *arguments, timeout=300, cwd=tmp_path, environment=environment
    )
    assert done.stdout.splitlines()[-1] == "no NCCL"
    notes = [line for line in done.stderr.splitlines() if "shared memory, not NCCL" in line]
    assert len(notes) == 1 and "rank 0: " in notes[0], done.stderr
