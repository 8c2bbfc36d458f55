"""Tests of scripts on a device: how worlds begin and end there, and what is left behind."""

import os
from pathlib import Path

import psutil
import pytest

import synkhronos as synk

PROGRAMS = Path(__file__).with_name("programs")


@pytest.fixture
def run_here(programs, run_python, tmp_path, devices):
    """Function that runs a program with this run's device as the first argument."""

    def run(program, *arguments, environment=None):
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        program, arguments = PROGRAMS / program, [devices[0], *arguments]
        options = {"timeout": 200, "environment": environment}
        if "THEANO_FLAGS" in (environment or {}):  # Theano reads them when it is imported
            done = run_python(program, *arguments, **options)
        else:
            done = programs.run_script(program, *arguments, cwd=tmp_path, **options)
        assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
        return done

    return run


def test_a_context_that_the_script_made_before_fork_is_an_error_with_the_remedy(run_here):
    run_here("context_before_fork.py", "script")


def test_a_context_that_theanos_flags_made_is_an_error_with_the_remedy(run_here, devices):
    flags = ",".join(filter(None, [os.environ.get("THEANO_FLAGS"), f"device={devices[0]}"]))
    run_here("context_before_fork.py", "flags", environment={"THEANO_FLAGS": flags})


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_device_that_is_not_there_is_an_error_that_names_the_rank(run_here, wrong):
    run_here("missing_device.py", wrong)


@pytest.mark.parametrize(
    "kwargs", [{"n_parallel": 3}, {"use_gpu": False}, {"master_rank": 2}, {"add": "cpu"}], ids=str
)
def test_devices_that_contradict_other_arguments_are_a_value_error(devices, kwargs):
    kwargs = {"devices": [devices[0], kwargs.get("add", devices[0])], **kwargs}
    kwargs.pop("add", None)
    if synk.world.world.world_exists():
        pytest.skip("there is a world in this process")
    with pytest.raises(ValueError, match="fork: "):
        synk.fork(**kwargs)


def test_a_dead_worker_breaks_the_world_and_the_next_one_begins_in_a_new_process(run_here):
    done = run_here("dead_worker.py", environment={"SYNKHRONOS_NCCL_SHARED_GPU": "0"})
    lines = [line for line in done.stderr.splitlines() if "NCCL" in line]
    assert len(lines) == 1 and "shared memory" in lines[0]


def test_a_script_that_ends_without_close_leaves_nothing(run_here):
    run_here("world_left_open.py")
