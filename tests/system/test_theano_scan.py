"""The loop of ``scan`` in C: it is used, and computes what Theano's loop in Python computes."""

import importlib.util
import logging
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import theano
import theano.scan_module
import theano.tensor as tt
from theano.sandbox.rng_mrg import MRG_RandomStreams

import synkhronos as synk

NAME = "theano.scan_module.scan_perform_ext"
MODE = theano.Mode("cvm", "fast_compile")  # FAST_COMPILE itself runs the loop in Python
ROWS = np.linspace(-1, 1, 24).reshape(6, 4)

x = tt.dmatrix("x")


def shared(shape, name):
    return theano.shared(np.linspace(-0.5, 0.5, int(np.prod(shape))).reshape(shape), name)


def sequence():
    return [theano.scan(lambda row: row**2, x)[0]], {}


def two_sequences_backwards():
    def step(later, row, earlier):
        return later - earlier + row

    together = dict(input=x, taps=[-1, 1])
    return [theano.scan(step, [together, x[1:-1]], go_backwards=True)[0]], {}


def recurrence():
    w = shared((4, 4), "w")
    states, _ = theano.scan(lambda row, state: tt.tanh(state.dot(w) + row), x, tt.zeros(4))
    return [states, states[-1]], {}


def two_taps():
    initial = dict(initial=x[:2], taps=[-2, -1])
    return [theano.scan(lambda row, a, b: a + 0.5 * b + row, x[2:], [initial])[0]], {}


def several_outputs():
    def step(row, state):
        return state + row, row.sum(), (row > 0).astype("int32")

    return theano.scan(step, x, [tt.zeros(4), None, None])[0], {}


def number_of_steps_from_an_input():
    n = (x > 0).sum()
    return [theano.scan(lambda state: 2 * state, outputs_info=[tt.ones(2)], n_steps=n)[0]], {}


def until():
    def step(row, total):
        total = total + row.sum()
        return total, theano.scan_module.until(total > 0)

    return [theano.scan(step, x[::-1], [tt.constant(-3.0, dtype="float64")])[0]], {}


def shared_updates():
    count, total = theano.shared(0, "count"), shared((4,), "total")

    def step(row):
        return row * total, {count: count + 1, total: total + row}

    outputs, updates = theano.scan(step, x)
    return [outputs], updates


def random_numbers():
    streams = MRG_RandomStreams(3)
    outputs, updates = theano.scan(lambda row: row * streams.uniform((4,)), x)
    return [outputs], updates


def gradient():
    w, initial = shared((4, 4), "w"), shared((4,), "initial")
    states, _ = theano.scan(lambda row, state: tt.tanh(state.dot(w) + row), x, [initial])
    return theano.grad(tt.sqr(states).sum(), [w, initial, x]), {}


def truncated_gradient():
    w = shared((4, 4), "w")
    states, _ = theano.scan(
        lambda row, state: tt.tanh(state.dot(w) + row), x, [tt.zeros(4)], truncate_gradient=3
    )
    return theano.grad(states[-1].sum(), [w]), {}


def scan_in_scan():
    def step(row, state):
        powers, _ = theano.scan(lambda one, other: one * other, row, [tt.ones(())])
        return state + powers

    return [theano.scan(step, x, [tt.zeros(4)])[0]], {}


GRAPHS = [
    sequence, two_sequences_backwards, recurrence, two_taps, several_outputs,
    number_of_steps_from_an_input, until, shared_updates, random_numbers, gradient, truncated_gradient,
    scan_in_scan,
]  # fmt: skip


def computed(graph):
    """Build a graph, call it twice, and return its outputs and the values of its shared variables."""
    outputs, updates = graph()
    f = theano.function([x], outputs, updates=updates, mode=MODE)
    results = [*f(ROWS), *f(ROWS[::-1])]
    return [*results, *(one.get_value() for one in f.get_shared())]


@pytest.fixture
def without_loop_in_c(monkeypatch):
    """Have Theano use its loop in Python."""

    def remove():
        monkeypatch.setitem(sys.modules, NAME, None)
        monkeypatch.delattr(theano.scan_module, NAME.rpartition(".")[2], raising=False)

    return remove


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.__name__)
def test_the_loop_in_c_computes_what_the_one_in_python_does(graph, without_loop_in_c, monkeypatch):
    calls = []
    module = importlib.import_module(NAME)
    perform = module.perform
    assert not isinstance(perform, types.FunctionType)  # it is compiled
    monkeypatch.setattr(module, "perform", lambda *args: calls.append(0) or perform(*args))
    in_c = computed(graph)
    assert len(calls) >= 2
    without_loop_in_c()
    before = len(calls)
    in_python = computed(graph)
    assert len(calls) == before
    assert len(in_c) == len(in_python)
    for one, other in zip(in_c, in_python):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


class Fail(theano.Op):
    """The identity, which fails if the sum is negative."""

    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        if inputs[0].sum() < 0:
            raise ArithmeticError("the sum is negative")
        outputs[0][0] = inputs[0].copy()


def test_an_exception_in_a_step_is_raised_and_the_function_can_be_called_again():
    total, _ = theano.scan(lambda row, state: state + Fail()(row), x, [tt.zeros(4)])
    f = theano.function([x], total[-1], mode=MODE)
    for _ in range(100):
        with pytest.raises(ArithmeticError, match="the sum is negative"):
            f(ROWS)
    np.testing.assert_array_equal(f(abs(ROWS)), abs(ROWS).sum(axis=0))


def test_ranks_compute_a_scan_and_its_gradient(world_of):
    world_of(3)
    w = shared((4, 4), "w")
    states, _ = theano.scan(lambda row, state: tt.tanh(state.dot(w) + row), x.T, [tt.zeros(4)])
    rows = tt.dmatrix("rows")
    loss = (rows.dot(w) * states[-1]).mean()
    inputs = dict(outputs=[loss, theano.grad(loss, w)], mode=MODE)
    serial = theano.function([rows, x], **inputs)
    early = synk.function([rows], bcast_inputs=[x], **inputs)
    synk.distribute()
    late = synk.function([rows], bcast_inputs=[x], **inputs)
    values = np.linspace(-2, 3, 36).reshape(9, 4)
    for f in (early, late):
        for one, other in zip(f(values, ROWS[:4]), serial(values, ROWS[:4])):
            np.testing.assert_allclose(one, other, rtol=1e-12)


FILE = Path(synk.__file__).parent / "engines" / "theano" / "repairs" / "scan_perform_ext.py"
only_here = pytest.mark.skipif(sys.version_info < (3, 11), reason="Theano compiles its own there")


class Config:
    """Theano's settings, with some replaced."""

    def __init__(self, **replaced):
        vars(self).update(replaced)

    def __getattr__(self, name):
        return getattr(theano_config, name)


theano_config = theano.config


@pytest.fixture
def load(monkeypatch, tmp_path):
    """A function that loads the module again, with a cache of its own and other settings."""

    def load_it(**settings):
        spec = importlib.util.spec_from_file_location("loaded_again", FILE)
        module = importlib.util.module_from_spec(spec)
        with monkeypatch.context() as patch:
            patch.setattr(theano, "config", Config(compiledir=str(tmp_path), **settings))
            spec.loader.exec_module(module)
        return module

    return load_it


@only_here
def test_it_is_compiled_once_into_the_cache(load, tmp_path):
    assert not isinstance(load().perform, types.FunctionType)
    files = sorted(path.name for path in (tmp_path / "scan_perform").iterdir())
    assert files == ["mod.cpp", "scan_perform.so"]
    assert not isinstance(load(cxx="no compiler").perform, types.FunctionType)


@only_here
def test_what_cannot_be_loaded_from_the_cache_is_compiled_again(load, tmp_path):
    folder = tmp_path / "scan_perform"
    folder.mkdir()
    (folder / "scan_perform.so").write_bytes(b"of another system, or of another version")
    assert isinstance(load(cxx="false").perform, types.FunctionType)
    assert not isinstance(load().perform, types.FunctionType)


@only_here
@pytest.mark.parametrize("cxx", ["false", "no-such-compiler", ""])
def test_without_a_compiler_scan_uses_the_loop_in_python(load, cxx, tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "synkhronos"):
        module = load(cxx=cxx)
    assert isinstance(module.perform, types.FunctionType)
    assert "the one in Python is used" in caplog.text
    assert not [*tmp_path.rglob("unfinished*"), *tmp_path.rglob("*.so")]
    expected = computed(gradient)
    monkeypatch.setattr(importlib.import_module(NAME), "perform", module.perform)
    for one, other in zip(computed(gradient), expected):
        np.testing.assert_array_equal(one, other)
