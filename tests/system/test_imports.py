"""Modules and repairs of Theano, Lasagne and Keras: what is needed here is active, and nothing else."""

import importlib.util
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from processes import own_process

from synkhronos.host import imports, progress

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


REPLACED = [row for row in imports.read_table() if not row.file]


@pytest.mark.parametrize("row", REPLACED, ids=lambda row: f"{row.modules}: {row.old!r:.40}")
def test_each_repair_finds_its_text_and_keeps_the_line_numbers(row):
    is_module = not row.modules.endswith(".c")
    assert row.why and (row.old.count("\n") == row.new.count("\n") or not is_module)
    for name in row.modules.split():
        if importlib.util.find_spec(re.split("[./]", name)[0]) is None:
            pytest.skip(f"{name} is not installed")
        text = file_of(name).read_text()
        assert row.old in text


def file_of(name):
    """Return the file of a module as it is installed. No package is imported."""
    package, *others = re.sub(r"\.c$", "", name).replace("/", ".").split(".")
    folder = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    file = folder.joinpath(*others)
    return file / "__init__.py" if file.is_dir() else file.with_suffix(".c" if "/" in name else ".py")


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
        rows = [imports.Repair("broken", "a test", *pair) for pair in pairs]
        loader = imports.RepairingLoader("broken", str(file), rows)
        module = ModuleType("broken")
        module.np = np
        exec(loader.get_code("broken"), vars(module))
        return module

    return load


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


@own_process
def test_the_module_that_shows_compiling_is_repaired_too():
    """As in a script that ``python -m synkhronos run`` starts, with NumPy 2."""
    import theano.compile

    row = imports.Repair(progress.MODULE, "a test", "def register_checker(", "def repaired(")
    imports.Finder._needed = {progress.MODULE: [row]}
    sys.meta_path.insert(0, imports.Finder)
    progress.provide()
    path = theano.compile.__path__
    specs = (finder.find_spec(progress.MODULE, path) for finder in list(sys.meta_path))
    spec = next(spec for spec in specs if spec is not None)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert hasattr(module, "repaired") and hasattr(module.orig_function, "__wrapped__")


def test_the_finder_of_the_start_stays_the_only_one(monkeypatch):
    """Another before it would load the module that shows compiling without showing it."""
    at_start = type("Finder", (imports.Finder,), {})  # of the same file, which Python ran before
    monkeypatch.setattr(sys, "meta_path", [at_start])
    imports.provide()
    assert sys.meta_path == [at_start]
