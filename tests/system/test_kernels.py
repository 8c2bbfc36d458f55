"""Tests of the choice between the library's operations and Theano's own."""

import os

import numpy as np
import pytest
import theano
import theano.tensor as tt
from processes import FOLDER, run_interpreter

import synkhronos as synk


PROGRAMS = FOLDER / "programs"


@pytest.fixture(autouse=True)
def fast_ones_again(open_world):
    yield
    open_world(1, kernels="fast")


def is_fast(function):
    return any(type(node.op).__name__.startswith("Fast") for node in function.maker.fgraph.apply_nodes)


@pytest.mark.parametrize(
    "argument, variable, expected",
    [(None, None, True), ("theano", None, False), (None, "theano", False), ("fast", "theano", True)],
)
def test_the_argument_has_priority(monkeypatch, open_world, argument, variable, expected):
    if variable:
        monkeypatch.setenv("SYNKHRONOS_KERNELS", variable)
    open_world(1, kernels=argument)
    x = tt.fmatrix("x")
    assert is_fast(theano.function([x], x.sum(0))) == expected
    assert is_fast(synk.function([x], x.sum(0))) == expected


def test_wrong_names(monkeypatch, open_world):
    with pytest.raises(ValueError, match="fork: kernels: expected one of 'fast', 'theano', got 'slow'"):
        open_world(1, kernels="slow")
    monkeypatch.setenv("SYNKHRONOS_KERNELS", "1")
    with pytest.raises(ValueError, match="SYNKHRONOS_KERNELS: expected one of"):
        open_world(1)


@pytest.mark.parametrize("after", [False, True])
def test_ranks_compute_the_same_as_one_process(open_world, after):
    """A function that is compiled before the workers start, and one that is sent to them."""
    open_world(2)
    x, w = tt.fmatrix("x"), theano.shared(np.arange(3, dtype="f"), "w")
    if after:
        synk.distribute()
    result = tt.nnet.relu(x - w) * tt.sgn(x)
    f = synk.function([x], [(result.sum(0), "sum"), tt.sqr(result - w).mean(), (result, "gather")])
    plain = theano.function([x], [result.sum(0), tt.sqr(result - w).mean(), result])
    assert is_fast(f) and is_fast(plain)
    array = np.random.RandomState(0).standard_normal((7, 3)).astype("f")
    for one, other in zip(f(array), plain(array)):
        np.testing.assert_allclose(one, other, 1e-6)


def test_a_scan_has_fast_operations_inside(open_world):
    open_world(1)
    x = tt.fmatrix("x")
    zero = tt.zeros((), "float32")
    total, _ = theano.scan(lambda row, old: old + (x * tt.sgn(row)).sum(), [x], zero)
    f = theano.function([x], total[-1])
    (scan,) = [node.op for node in f.maker.fgraph.apply_nodes if type(node.op).__name__ == "Scan"]
    assert is_fast(scan.fn)
    array = np.random.RandomState(0).standard_normal((4, 3)).astype("f")
    np.testing.assert_allclose(f(array), sum((array * np.sign(row)).sum() for row in array), 1e-5)


@pytest.mark.slow
def test_other_scripts_neither_import_the_library_nor_lose_its_modules(tmp_path, run_python):
    flags = f"{os.environ['THEANO_FLAGS']},base_compiledir={tmp_path}/cache"
    # Theano names some of its own modules by a hash of strings.
    environment = {**os.environ, "THEANO_FLAGS": flags, "PYTHONHASHSEED": "0"}

    def output_of(*words):
        done = run_python(*words, environment=environment)
        return done.stdout.splitlines()

    def modules():
        return sorted(path.parent.name for path in tmp_path.glob("cache/*/*/key.pkl"))

    assert int(output_of(PROGRAMS / "cached_keys.py")[-1]) > 4
    compiled = modules()
    assert output_of(PROGRAMS / "cached_keys.py")[-1] == "0"
    # A script of plain Theano, which reads the keys of all modules.
    words = "-m", "synkhronos", "run", PROGRAMS / "loop_of_theano.py"
    done = run_interpreter(*words, environment=environment, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "False", done.stdout + done.stderr
    assert set(compiled) <= set(modules())
    assert output_of(PROGRAMS / "cached_keys.py")[-1] == "0"
