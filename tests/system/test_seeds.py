"""Tests that scripts written for the interface documented in 2017 run unchanged."""

import inspect
import json
import os

import numpy as np
import pytest
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


def test_objects_have_the_attributes_of_2017(open_world):
    open_world(1)
    data, function = synk.data(np.zeros(3)), synk.function([], T.constant(1.0))
    for found, names in (
        (data, "data alloc_size dtype ndim shape size minibatch name"),
        (function, "name output_modes update_modes as_theano"),
    ):
        assert [name for name in names.split() if not hasattr(found, name)] == []
