"""Modules and repairs of Theano, Lasagne and Keras: what is needed here is active, and nothing else."""

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from processes import own_process

from synkhronos.host import imports, repairs

PACKAGE = Path(imports.__file__).parents[1]

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
    for name in ("theano", "theano.tensor.signal.conv", "lasagne.layers", "downsample", "json"):
        assert imports.Finder.find_spec(name) is None


def test_each_module_is_found_by_its_name_and_exists():
    for one in repairs.MODULES:
        assert (PACKAGE / one.file).is_file()
    for name, file in imports.Finder.needed().files.items():
        assert importlib.util.find_spec(name).origin == str(file)


@pytest.mark.parametrize("row", repairs.REPAIRS, ids=lambda row: f"{row.modules}: {row.old!r:.40}")
def test_each_repair_finds_its_text_and_keeps_the_line_numbers(row):
    assert row.old.count("\n") == row.new.count("\n")
    assert row.why
    for name in row.modules.split():
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"{name} is not installed")
        text = file_of(name).read_text()
        assert row.old in text


def file_of(name):
    """Return the file of a module as it is installed. No package is imported."""
    package, *others = name.split(".")
    folder = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    file = folder.joinpath(*others)
    return file / "__init__.py" if file.is_dir() else file.with_suffix(".py")


def test_only_the_repairs_of_these_versions_are_active():
    import theano.gof.cmodule

    text = theano.gof.cmodule.__spec__.loader.get_source("theano.gof.cmodule")
    assert ("import sysconfig" in text) == (sys.version_info >= (3, 12))
    assert ("PREAMBLE" in text) == (np.lib.NumpyVersion(np.__version__) >= "1.24.0")
    assert "numpy.distutils" not in text


def test_the_c_code_of_gpu_operations_is_the_same_in_each_process():
    """Else two compiled modules can get the same key, of which Theano warns in each later process."""
    from theano.gpuarray.type import gpu_context_type

    assert str(gpu_context_type) == "GpuContextType"


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A module that needs repairs, and a function that returns its loader with some repairs."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    file = tmp_path / "broken.py"
    file.write_text("first = np.product\nsecond = 2\nthird = np.product\n")

    def load(*pairs):
        rows = [repairs.Repair("broken", "a test", *pair) for pair in pairs]
        loader = imports.RepairingLoader("broken", str(file), rows)
        module = ModuleType("broken")
        module.np = np
        exec(loader.get_code("broken"), vars(module))
        return module

    return load


def test_a_repair_replaces_each_occurrence_and_nothing_else(broken):
    module = broken(("np.product", "np.prod"), ("not there", "nothing"))
    assert (module.first, module.second, module.third) == (np.prod, 2, np.prod)


def test_other_repairs_do_not_run_the_bytecode_of_former_ones(broken, tmp_path):
    replaced = ("np.product", "np.prod")
    assert broken(replaced).second == 2
    assert broken(replaced, ("second = 2", "second = 3")).second == 3
    assert broken(replaced).second == 2
    names = {path.name for path in (tmp_path / "__pycache__").iterdir()}
    assert len(names) == 2 and all(".repaired-" in name for name in names)


@own_process
def test_numpy_is_not_changed_for_scripts():
    before = dict(vars(np))
    import lasagne.layers  # noqa: F401
    import theano.tensor.nnet  # noqa: F401

    changed = {name for name, value in vars(np).items() if value is not before.get(name)}
    assert not [name for name in changed if not isinstance(getattr(np, name), ModuleType)]


def test_providing_them_again_changes_nothing():
    before = list(sys.meta_path)
    imports.provide()
    assert sys.meta_path == before and before.count(imports.Finder) == 1


def test_the_folder_for_the_start_comes_first_in_the_path():
    folder = str(PACKAGE / "startup")
    assert imports.variables({}) == {"PYTHONPATH": folder}
    assert imports.variables({"PYTHONPATH": ""}) == {"PYTHONPATH": folder}
    assert imports.variables({"PYTHONPATH": "a:b"}) == {"PYTHONPATH": f"{folder}{os.pathsep}a:b"}


@pytest.mark.parametrize("flag", ["ignore_environment", "no_site"])
def test_a_python_that_would_not_look_there_gets_no_variables(monkeypatch, flag):
    flags = {"ignore_environment": 0, "no_site": 0, flag: 1}
    monkeypatch.setattr(sys, "flags", SimpleNamespace(**flags))
    assert imports.variables({}) == {}
