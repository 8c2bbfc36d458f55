"""Scripts of their own on a device: how a world begins there, how it ends, and what is left behind."""

import os

import psutil
import pytest

import synkhronos as synk

BEGIN = """
import os, signal, sys
import numpy as np
import psutil
import synkhronos as synk

device = sys.argv[1]

def children():
    return psutil.Process().children(recursive=True)

def error_of(call, kind):
    try:
        call()
    except kind as error:
        assert not children(), children()
        assert not synk.world.world.world_exists()
        return str(error)
    raise AssertionError("no error")
"""


@pytest.fixture
def run_here(run_python, devices):
    """A function that runs code as a script whose first argument is this run's device."""

    def run(code, **kwargs):
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        done = run_python(BEGIN + code, devices[0], timeout=200, **kwargs)
        assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
        return done

    return run


REFUSED = """
message = error_of(lambda: synk.fork(devices=[device] * 2), RuntimeError)
assert "THEANO_FLAGS=device=cpu,force_device=True" in message, message
assert synk.fork(devices=[device]) == 1
import theano, theano.tensor as tt
x = tt.fvector()
assert synk.function([x], ((x * 2).sum(), "sum"))([1.0, 1.0, 1.0]) == 6
synk.close()
"""


def test_a_context_that_the_script_made_before_fork_is_an_error_with_the_remedy(run_here):
    run_here("import theano.gpuarray; theano.gpuarray.use(device)" + REFUSED)


def test_a_context_that_theanos_flags_made_is_an_error_with_the_remedy(run_here, devices):
    flags = ",".join(filter(None, [os.environ.get("THEANO_FLAGS"), f"device={devices[0]}"]))
    run_here("import theano.tensor" + REFUSED, environment={"THEANO_FLAGS": flags})


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_device_that_is_not_there_is_an_error_that_names_the_rank(run_here, wrong):
    run_here(f"""
wrong = {wrong}
missing = "opencl7:0" if device.startswith("opencl") else "cuda99"
devices = [device, device]
devices[wrong] = missing
message = error_of(lambda: synk.fork(devices=devices), Exception)
print(message)
assert f"rank {{wrong}}" in message and missing in message, message
assert synk.fork(devices=[device]) == 1
synk.close()
""")


@pytest.mark.parametrize(
    "kwargs", [{"n_parallel": 3}, {"use_gpu": False}, {"master_rank": 2}, {"add": "cpu"}], ids=str)
def test_devices_that_contradict_other_arguments_are_a_value_error(devices, kwargs):
    kwargs = {"devices": [devices[0], kwargs.get("add", devices[0])], **kwargs}
    kwargs.pop("add", None)
    if synk.world.world.world_exists():
        pytest.skip("there is a world in this process")
    with pytest.raises(ValueError, match="fork: "):
        synk.fork(**kwargs)


def test_a_dead_worker_breaks_the_world_and_the_next_one_begins_in_a_new_process(run_here):
    done = run_here("""
    assert synk.fork(devices=[device] * 2) == 2
    import theano, theano.tensor as tt
    s = theano.shared(np.arange(4, dtype="float32"))
    x = tt.fvector()
    f = synk.function([x], [(x.sum() + s.sum(), "sum"), (x * 2, "gather")], updates=[(s, s + 1)])
    for length in (7, 1):
        total, doubled = f([1.0] * length)
        assert doubled.tolist() == [2] * length
    try:
        f([1.0, 2.0], batch_s=[0])
    except ValueError:
        pass
    os.kill(children()[0].pid, signal.SIGKILL)
    try:
        f([1.0] * 7)
    except synk.WorldBrokenError as error:
        assert "rank 1" in str(error) and "SIGKILL" in str(error), error
    else:
        raise AssertionError("no error")
    synk.close()
    assert not children()
    assert s.get_value()[0] in (2, 3)  # the master may have done its part of the last call
    message = error_of(lambda: synk.fork(devices=[device] * 2), RuntimeError)
    assert "begin the next world in a new process" in message, message
    assert synk.fork(devices=[device]) == 1
    g = synk.function([x], (x * s.sum(), "gather"))
    total = s.get_value().sum()
    assert g([1.0, 2.0]).tolist() == [total, 2 * total]
    """.replace("\n    ", "\n"), environment={"SYNKHRONOS_NCCL_SHARED_GPU": "0"})
    lines = [line for line in done.stderr.splitlines() if "NCCL" in line]
    assert len(lines) == 1 and "shared memory" in lines[0]


def test_a_script_that_ends_without_close_leaves_nothing(run_here):
    run_here("""
    synk.fork(devices=[device] * 2)
    import theano, theano.tensor as tt
    s = theano.shared(np.arange(4, dtype="float32"))
    f = synk.function([], (s, "gather"))
    assert len(f()) == 8
    """.replace("\n    ", "\n"))
