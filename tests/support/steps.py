"""Comparison of training steps on all ranks with the serial ones."""

import numpy as np

import synkhronos as synk
from compilers import compiler, cross_entropy, softmax, tt

ROWS = 41
COLUMNS = 5
CLASSES = 3
STEPS = 20
#: Also one row, which is fewer than there are ranks.
LENGTHS = (ROWS, 1, 2, 13, 8, 3)


def digits(dtype="float64"):
    rng = np.random.RandomState(3)
    return rng.randn(ROWS, COLUMNS).astype(dtype), rng.randint(0, CLASSES, ROWS).astype("int32")


def batches(steps=STEPS):
    rng = np.random.RandomState(4)
    for step in range(steps):
        yield rng.permutation(ROWS)[: LENGTHS[step % len(LENGTHS)]]


class Network:
    """A network of two layers, with new parameters each time, equal ones for an equal seed."""

    def __init__(self, dtype="float64", seed=5):
        rng = np.random.RandomState(seed)

        def shared(name, *shape):
            return compiler.shared((rng.randn(*shape) / 2).astype(dtype), name)

        self.x, self.y = tt.matrix("x", dtype=dtype), tt.ivector("y")
        self.params = [
            shared("w1", COLUMNS, 4), shared("b1", 4), shared("w2", 4, CLASSES), shared("b2", CLASSES)
        ]  # fmt: skip
        w1, b1, w2, b2 = self.params
        self.hidden = tt.tanh(tt.dot(self.x, w1) + b1)
        self.probabilities = softmax(tt.dot(self.hidden, w2) + b2)
        self.losses = cross_entropy(self.probabilities, self.y)
        self.loss = self.losses.mean()
        self.penalty = 0.01 * sum(tt.sqr(param).sum() for param in self.params)
        self.accuracy = tt.eq(tt.argmax(self.probabilities, axis=1), self.y).mean(dtype=dtype)

    def shared(self, value, name=None):
        return compiler.shared(np.asarray(value, self.params[0].dtype), name)


def assert_same_values(ours, theirs, **tolerances):
    """Every rank has the values of the serial function."""
    tolerances = {"rtol": 1e-9, "atol": 1e-11, **tolerances}
    for one, other in zip(ours, theirs):
        for replica in synk.gather(one):
            np.testing.assert_allclose(replica, other.get_value(), err_msg=str(one), **tolerances)


def assert_same_results(ours, theirs, **tolerances):
    tolerances = {"rtol": 1e-9, "atol": 1e-11, **tolerances}
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        ours, theirs = list(ours.values()), list(theirs.values())
    if not isinstance(theirs, list):
        assert not isinstance(ours, list)
        ours, theirs = [ours], [theirs]
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        np.testing.assert_allclose(one, other, **tolerances)
        assert np.asarray(one).dtype == np.asarray(other).dtype
