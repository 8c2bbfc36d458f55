"""Keras models in pairs, a serial and a parallel one, and comparisons. Importing this imports Keras."""

import numpy as np

import synkhronos as synk
from synkhronos.extensions.keras import parallelize

import keras

ROWS, COLUMNS, CLASSES = 23, 5, 3
TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def digits(seed=3, rows=ROWS):
    rng = np.random.RandomState(seed)
    return rng.randn(rows, COLUMNS), np.eye(CLASSES)[rng.randint(0, CLASSES, rows)]


def network(**options):
    """A model of two layers that is not compiled."""
    return keras.models.Sequential([
        keras.layers.Dense(4, activation="tanh", input_shape=(COLUMNS,), **options),
        keras.layers.Dense(CLASSES, activation="softmax"),
    ])  # fmt: skip


def pair(build):
    """Return two equal models; the second computes on all ranks."""
    np.random.seed(6)
    serial, parallel = build(), build()
    parallel.set_weights(serial.get_weights())
    return serial, parallelize(parallel)


def compiled(build=network, optimizer="sgd", loss="categorical_crossentropy", **options):
    """Return the pair, compiled. A function as optimizer or loss is called for each of them."""

    def make():
        model = build()
        rule = optimizer if isinstance(optimizer, str) else optimizer()
        model.compile(rule, loss, **options)
        return model

    return pair(make)


def assert_equal_steps(models, calls):
    """Both models return the same for each call of ``train_on_batch``, and end with the same weights."""
    serial, parallel = models
    for args, kwargs in calls:
        expected = serial.train_on_batch(*args, **kwargs)
        np.testing.assert_allclose(parallel.train_on_batch(*args, **kwargs), expected, **TIGHT)
    assert_same_weights(*models)


def assert_same_weights(serial, parallel):
    """Every rank has the weights and the state of the optimizer of the serial model."""
    ours = parallel.weights + parallel.optimizer.weights
    theirs = serial.weights + serial.optimizer.weights
    assert len(ours) == len(theirs) > 1
    replicated = {one for each in parallel.train_function.functions for one in each.get_shared()}
    for one, other in zip(ours, theirs):
        for replica in synk.gather(one) if one in replicated else [one.get_value()]:
            np.testing.assert_allclose(replica, other.get_value(), err_msg=str(one), **TIGHT)


def assert_equal_histories(ours, theirs):
    assert ours.history.keys() == theirs.history.keys()
    for name, values in theirs.history.items():
        np.testing.assert_allclose(ours.history[name], values, err_msg=name, **TIGHT)


def fitted(model, *args, **kwargs):
    """Return the history of a call of ``fit`` that draws the same batches each time."""
    np.random.seed(7)
    return model.fit(*args, verbose=0, **kwargs)
