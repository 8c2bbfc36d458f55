"""The benchmark's step with a divided state of Adam: it equals the ordinary step, in parts by rank."""

import importlib
import sys

import numpy as np
import pytest
import theano
import theano.tensor as tt
from processes import ROOT

import synkhronos as synk
from synkhronos.extensions import train, updates

pytestmark = pytest.mark.usefixtures("in_python")
FEATURES, ROWS = 3, 10


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("divided_state")


class Model:
    """A layer of 20 parameters, of which one part ends within the weights."""

    def __init__(self):
        random = np.random.RandomState(1)
        weights = random.normal(size=(FEATURES, 5)).astype("float32")
        self.x, self.y = tt.fmatrix("x"), tt.fmatrix("y")
        self.params = [theano.shared(weights, "w"), theano.shared(np.zeros(5, "float32"), "b")]
        self.loss = tt.sqr(tt.tanh(self.x.dot(self.params[0]) + self.params[1]) - self.y).mean()

    def values(self):
        return [one.get_value() for one in self.params]


def data():
    random = np.random.RandomState(2)
    return [random.normal(size=(ROWS, n)).astype("float32") for n in (FEATURES, 5)]


def steps_of(step, model, count):
    return [(step(*data()), *model.values()) for _ in range(count)]


def divided_model(benchmark, ranks):
    model = Model()
    adam = benchmark.divided_adam(model.loss, model.params, ranks)
    step = benchmark.divided_step([model.x, model.y], model.loss, adam, [], ranks)
    return model, adam, step


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_with_a_divided_state_equal_ordinary_steps_to_the_last_bit(benchmark, world_of, ranks):
    world_of(ranks)
    model = Model()
    hyper = benchmark.LEARNING_RATE, benchmark.BETA1, benchmark.BETA2, benchmark.EPSILON
    arguments = model.loss, model.params, model.x, model.y, updates.adam, *hyper
    expected = steps_of(train.make_train_function(*arguments), model, 4)
    model, adam, step = divided_model(benchmark, ranks)
    for one, other in zip(steps_of(step, model, 4), expected):
        for got, wanted in zip(one, other):
            np.testing.assert_array_equal(got, wanted)
    assert not np.array_equal(model.values()[0], Model().values()[0])
    assert synk.in_sync(model.params)
    assert [len(one) for one in synk.gather([pair[0] for pair in adam.update[:2]])[0]] == [
        20 // ranks
    ] * ranks


def test_a_checkpoint_of_a_divided_state_is_for_as_many_ranks(benchmark, world_of, tmp_path):
    world_of(2)
    model, _, step = divided_model(benchmark, 2)
    steps_of(step, model, 2)
    synk.save(tmp_path / "file.npz")
    expected = steps_of(step, model, 2)
    synk.load(tmp_path / "file.npz")
    for one, other in zip(steps_of(step, model, 2), expected):
        for got, wanted in zip(one, other):
            np.testing.assert_array_equal(got, wanted)
    synk.close()
    world_of(4)
    divided_model(benchmark, 4)
    with pytest.raises(ValueError):
        synk.load(tmp_path / "file.npz")
