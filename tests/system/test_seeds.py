"""Tests that scripts written for the interface documented in 2017 run unchanged."""

import inspect
import json
import os

import numpy as np
import pytest
import theano
import theano.tensor as T
from prelude import run_file

import synkhronos as synk

# The flags that the MNIST page requires, and a mode that compiles less.
FLAGS = "floatX=float32,device=cpu,force_device=True,mode=FAST_COMPILE"
FLOAT32 = {"THEANO_FLAGS": ",".join(filter(None, [os.environ.get("THEANO_FLAGS"), FLAGS]))}

SHARED_VARIABLES_OUTPUT = """
s initial:
 [ 1.  1.]

s after Theano call:
 [ 10.  10.]

local s after reset and Synkhronos call:
 [ 3.  3.]

gathered s:
 [[ 3.  3.]
 [ 7.  7.]]

local s after in-place reduce:
 [ 10.  10.]

gathered s after reduce:
 [[ 10.  10.]
 [  7.   7.]]

gathered s after reset broadcast, Synkhronos call, and all-reduce:
 [[ 10.  10.]
 [ 10.  10.]]
"""


@pytest.mark.parametrize("keywords", [{}, {"use_gpu": False}], ids=str)
def test_shared_variable_example_prints_what_its_page_shows(tmp_path, keywords):
    if not keywords and synk.get_n_gpu() == 1:
        pytest.skip("the page was written for two GPUs; here is one")
    script, argument = "shared_variables_of_2017.py", json.dumps(keywords)
    done = run_file(script, argument, cwd=tmp_path, environment=FLOAT32)
    assert done.stdout == SHARED_VARIABLES_OUTPUT


def test_training_script_of_the_mnist_page_equals_serial_training(tmp_path):
    run_file("mnist_of_2017.py", cwd=tmp_path, environment=FLOAT32)


@pytest.fixture(scope="module")
def world(open_world):
    """Functions and data in a world of two ranks. `f` has two inputs, and `g` only the second one."""

    class Made:
        x, y = T.matrix("x", dtype="float64"), T.vector("y", dtype="float64")

    open_world(2)
    Made.rows = theano.shared(np.zeros((1, 2)), "rows")
    Made.f = synk.function([Made.x, Made.y], (Made.x[:, 0] + Made.y, "gather"), name="f")
    Made.g = synk.function([Made.y], (Made.y.sum(), "sum"), name="g")
    Made.h = synk.function([], (Made.rows.sum(), "gather"), name="h")
    synk.distribute()
    Made.x_value, Made.y_value = np.arange(12.0).reshape(6, 2), np.ones(6)
    return Made


def test_bound_data_is_used_by_calls_that_name_only_rows(world):
    world.f.set_input_shmems(world.x_value, world.y_value)
    for batch in (slice(1, 4), [5, 0, 2], (5, 0, 2), np.array([5, 0, 2]), range(2, 5)):
        rows = list(batch) if isinstance(batch, (tuple, range)) else batch
        np.testing.assert_array_equal(world.f(batch=batch), world.x_value[rows, 0] + 1)


def test_functions_that_share_inputs_share_the_bound_data(world):
    x_data, y_data = world.f.set_input_shmems(world.x_value, world.y_value)
    assert world.g.get_input_shmems() == [y_data]
    assert world.f.get_input_shmems() == [x_data, y_data]
    y_data[:] = 2
    assert world.g(batch=slice(4)) == 8


def test_inputs_are_bound_by_name_too(world):
    world.f.set_input_shmems(y=world.y_value * 3, x=world.x_value)
    (only,) = world.f.set_input_shmems(y=world.y_value * 3)
    assert only is synk.get_shmems(world.y)
    np.testing.assert_array_equal(world.f(batch=slice(2)), [3, 5])


def test_inputs_given_in_a_call_leave_the_bound_ones_alone(world):
    world.f.set_input_shmems(world.x_value, world.y_value)
    np.testing.assert_array_equal(world.f(y=world.y_value * 5, batch=slice(2)), [5, 7])
    np.testing.assert_array_equal(world.f(batch=slice(2)), [1, 3])


def test_wrong_inputs_to_bind_are_refused_and_change_nothing(world):
    world.f.set_input_shmems(world.x_value, world.y_value)
    bound = world.f.get_input_shmems()
    with pytest.raises(TypeError, match="at most 2 inputs, got 3"):
        world.f.set_input_shmems(world.x_value, world.y_value, world.y_value)
    with pytest.raises(TypeError, match="no input is named 'z'"):
        world.f.set_input_shmems(z=world.y_value)
    with pytest.raises(TypeError, match="'x' is given twice"):
        world.f.set_input_shmems(world.x_value, x=world.x_value)
    with pytest.raises(TypeError, match="2 dimensions, got 1"):
        world.f.set_input_shmems(world.y_value, world.y_value)
    assert world.f.get_input_shmems() == bound
    np.testing.assert_array_equal(bound[0], world.x_value)


def test_freed_data_is_no_longer_bound(world):
    world.f.set_input_shmems(world.x_value, world.y_value)
    x_data = synk.get_shmems(world.x)
    synk.free_shmems(world.x)
    with pytest.raises(ValueError, match="no data is bound to x"):
        world.f.get_input_shmems()
    with pytest.raises(TypeError, match="no value for input 'x'"):
        world.f(batch=slice(2))
    with pytest.raises(ValueError, match="freed"):
        x_data[0]


def test_scatter_takes_rows_of_the_data_bound_to_a_shared_variable(world):
    synk.set_shmems({world.rows: world.x_value})
    for batch in (slice(0, 4), [1, 3, 0]):
        synk.scatter(world.rows, batch=batch)
        np.testing.assert_array_equal(synk.gather(world.rows, nd_up=0), world.x_value[batch])
    synk.scatter([world.rows])
    np.testing.assert_array_equal(world.h(), world.x_value.reshape(2, 6).sum(axis=1))


SIGNATURES = {
    "fork": "n_parallel=None, use_gpu=None, master_rank=0, profile_workers=False, "
    "max_n_var=1000, max_dim=16",
    "close": "",
    "get_n_gpu": "",
    "function": "inputs, outputs=None, bcast_inputs=None, updates=None, givens=None, "
    "sliceable_shareds=None, **kwargs",
    "distribute": "",
    "data": "value=None, var=None, dtype=None, ndim=None, shape=None, minibatch=False, "
    "force_cast=False, oversize=1, name=None, constant=False",
    "broadcast": "shared_vars, values=None, nccl=True",
    "scatter": "shared_vars, values=None, batch=None",
    "gather": "shared_vars, nd_up=1, nccl=True",
    "all_gather": "shared_vars, nccl=True",
    "reduce": "shared_vars, op='avg', in_place=True, nccl=True",
    "all_reduce": "shared_vars, op='avg', nccl=True",
    "set_value": "rank, shared_vars, values, batch=None",
    "get_value": "rank, shared_vars",
    "get_lengths": "shared_vars",
    "get_shapes": "shared_vars",
    "set_shmems": "vars_data, oversize=None",
    "get_shmems": "*variables",
    "free_shmems": "*variables",
    "make_slices": "arrays",
    "Function.__call__": "*args, output_subset=None, batch=None, batch_s=None, num_slices=1, "
    "**inputs_by_name",
    "Function.build_inputs": "*args, force_cast=False, oversize=1.0, minibatch=False",
    "Function.set_input_shmems": "*values, **values_by_name",
    "Function.get_input_shmems": "",
    "Function.get_shared": "",
    "Data.set_value": "value, force_cast=False, oversize=1",
    "Data.set_length": "length, oversize=1",
    "Data.set_shape": "shape, oversize=1",
    "Data.condition_data": "value, force_cast=False",
    "Data.free_memory": "",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_arguments_and_defaults_are_those_of_2017(name):
    found = synk
    for part in name.split("."):
        found = getattr(found, part)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(found).parameters.values()
        if parameter.name != "self"
    ]
    # Parameters added after 2017 are keyword-only, except in calls of functions.
    if not any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters):
        parameters = [one for one in parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert ", ".join(map(str, parameters)) == SIGNATURES[name]


@pytest.mark.parametrize(
    "name", ["data", "alloc_size", "dtype", "ndim", "shape", "size", "minibatch", "name"]
)
def test_data_has_the_attributes_of_2017(world, name):
    assert hasattr(synk.data(np.zeros(3)), name)


@pytest.mark.parametrize("name", ["name", "output_modes", "update_modes", "as_theano"])
def test_functions_have_the_attributes_of_2017(world, name):
    assert hasattr(world.f, name)
