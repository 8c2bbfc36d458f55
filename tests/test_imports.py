"""Modules that are provided in Theano's place: Lasagne 0.1 can be imported, and nothing else changes."""

import importlib.util
import os
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from processes import own_process

from synkhronos.host import imports

if importlib.util.find_spec("lasagne") is None:
    pytest.skip("the tests need lasagne", allow_module_level=True)

DOWNSAMPLE = "theano.tensor.signal.downsample"


@own_process
def test_lasagne_can_be_imported_and_does_not_warn():
    import theano
    import theano.tensor as tt

    assert not {"lasagne", DOWNSAMPLE} & {*sys.modules}  # neither Theano nor we import them
    warnings.simplefilter("error", UserWarning)
    import lasagne
    from lasagne import layers

    x = tt.dtensor4("x")
    network = layers.InputLayer((None, 1, 6, 8), x)
    pooled = layers.MaxPool2DLayer(network, (3, 2), stride=(2, 1), pad=(1, 0))
    summed = layers.Pool2DLayer(network, (2, 2), mode="average_inc_pad")
    filtered = layers.Conv2DLayer(network, 1, 3, W=lasagne.init.Constant(1.0), nonlinearity=None)
    outputs = [layers.get_output(one) for one in (pooled, summed, filtered)]
    f = theano.function([x], outputs, mode=theano.Mode("cvm", "fast_compile"))
    image = np.random.RandomState(1).normal(size=(6, 8))
    largest, mean, total = (one[0, 0] for one in f(image[None, None]))
    bordered = np.pad(image, ((1, 1), (0, 0)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view
    np.testing.assert_array_equal(largest, windows(bordered, (3, 2)).max(axis=(2, 3))[::2])
    np.testing.assert_allclose(mean, windows(image, (2, 2)).mean(axis=(2, 3))[::2, ::2])
    np.testing.assert_allclose(total, windows(image, (3, 3)).sum(axis=(2, 3)))


def test_other_modules_are_left_to_python():
    for name in ("theano", "theano.tensor.signal.pool", "lasagne", "downsample", "json"):
        assert imports.Finder.find_spec(name) is None


def test_each_module_is_found_by_its_name_and_exists():
    for name, file in imports.FILES.items():
        assert file.is_file()
        assert importlib.util.find_spec(name).origin == str(file)


def test_providing_them_again_changes_nothing():
    before = list(sys.meta_path)
    imports.provide()
    assert sys.meta_path == before and before.count(imports.Finder) == 1


def test_the_folder_for_the_start_comes_first_in_the_path():
    folder = str(imports.FILES[DOWNSAMPLE].parent.parent / "startup")
    assert imports.variables({}) == {"PYTHONPATH": folder}
    assert imports.variables({"PYTHONPATH": ""}) == {"PYTHONPATH": folder}
    assert imports.variables({"PYTHONPATH": "a:b"}) == {"PYTHONPATH": f"{folder}{os.pathsep}a:b"}


@pytest.mark.parametrize("flag", ["ignore_environment", "no_site"])
def test_a_python_that_would_not_look_there_gets_no_variables(monkeypatch, flag):
    flags = {"ignore_environment": 0, "no_site": 0, flag: 1}
    monkeypatch.setattr(sys, "flags", SimpleNamespace(**flags))
    assert imports.variables({}) == {}
