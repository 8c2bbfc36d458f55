"""Theano's own flags, with which scripts look for mistakes: test values and precision."""

import contextlib

import lasagne
import numpy as np
import pytest
import theano
import theano.tensor as tt

import synkhronos as synk
from steps import assert_same_results
from synkhronos.extensions import batch_norm, train, updates

pytestmark = pytest.mark.usefixtures("in_python", "in_threads")
ROWS = np.random.RandomState(7).normal(size=(12, 3))


@contextlib.contextmanager
def flags(**values):
    with theano.change_flags(**values):
        yield


def with_test_value(variable, value):
    variable.tag.test_value = value
    return variable


@pytest.fixture
def tested():
    """All variables of the script's graphs need test values."""
    with flags(compute_test_value="raise"):
        yield


@pytest.fixture(params=["off", "raise"])
def all_tested(tested, request):
    """Perhaps also those that Theano makes when it optimizes a graph."""
    with flags(compute_test_value_opt=request.param):
        yield


def linear(dtype):
    """Inputs, a loss, its updates by Adam, and the parameters."""
    x, y = tt.matrix("x", dtype), tt.vector("y", dtype)
    w, b = theano.shared(np.ones(3, dtype), "w"), theano.shared(np.zeros((), dtype), "b")
    loss = tt.sqr(tt.dot(x, w) + b - y).mean()
    return [x, y], loss, lasagne.updates.adam(loss, [w, b], 0.05, epsilon=1e-3), [w, b]


@pytest.mark.parametrize("floatX", ["float16", "float32"])
def test_a_step_in_the_precision_of_the_flag(two, floatX):
    data = [ROWS.astype(floatX), ROWS.sum(axis=1).astype(floatX)]
    values = []
    with flags(floatX=floatX):
        for build in (theano.function, train.parallel_function):
            inputs, loss, updates, params = linear(floatX)
            f = build(inputs, [loss, abs(tt.grad(loss, params[0])).sum()], updates=updates)
            results = [f(*data) for _ in range(5)][-1]
            values.append([*results, *(one.get_value() for one in params)])
            assert {one.dtype.name for one in values[-1]} == {floatX}
    assert_same_results(values[1], values[0], rtol=0.01, atol=0.01)


@pytest.mark.filterwarnings("ignore:loss_op:synkhronos.SynkhronosWarning")  # the loss is a mean
@pytest.mark.parametrize("floatX", ["float16", "float32"])
@pytest.mark.parametrize("loss_op", ["avg", "sum"])
def test_no_tensor_of_a_step_is_float64(two, loss_op, floatX):
    data = [ROWS.astype(floatX), ROWS.sum(axis=1).astype(floatX)]
    with flags(floatX=floatX, warn_float64="raise"):
        inputs, loss, _, params = linear(floatX)
        step = train.make_train_function(
            loss + 0.01 * tt.sqr(params[0]).sum(), params, *inputs, updates.adam, epsilon=1e-3,
            loss_op=loss_op, outputs=[(loss, "min")], overlap=True,
            updates=[(theano.shared(np.zeros(3, floatX)), inputs[0].mean(axis=0))],
        )  # fmt: skip
        loss, least = step(*data)
    assert loss.dtype == least.dtype == floatX


@pytest.mark.parametrize("axes", ["per-activation", "spatial"])
def test_no_tensor_of_batch_normalization_is_float64(two, axes):
    with flags(floatX="float32", warn_float64="raise"):
        x = tt.matrix("x") if axes == "per-activation" else tt.tensor4("x")
        gamma, beta, mean, variance = [theano.shared(np.ones(3, "float32")) for _ in range(4)]
        out, *_, new_mean, new_variance = batch_norm.batch_normalization_train(
            x, gamma, beta, axes, running_mean=mean, running_var=variance
        )
        loss = tt.sqr(out).mean()
        step = train.parallel_function(
            [x], loss, updates=[(gamma, gamma - tt.grad(loss, gamma)), (mean, new_mean)]
        )
        data = ROWS.astype("float32")
        assert step(data if x.ndim == 2 else data[:, :, None, None]).dtype == "float32"


def windows():
    """An index, its rows of shared data as givens, and a loss and its updates."""
    index, x = tt.lscalar("index"), with_test_value(tt.dmatrix("x"), ROWS[:4])
    index.tag.test_value = 1
    w = theano.shared(np.ones(3), "w")
    loss = tt.sqr(tt.dot(x, w)).mean()
    start = index * 4
    givens = {x: theano.shared(ROWS)[start : start + 4]}
    return index, loss, [(w, w - 0.1 * tt.grad(loss, w))], givens


def test_a_step_with_windows_needs_no_further_test_values(two, tested):
    results = []
    for build in (theano.function, train.parallel_function):
        index, loss, updates, givens = windows()
        f = build([index], loss, updates=updates, givens=givens)
        results.append([f(0), f(2), updates[0][0].get_value()])
    assert_same_results(results[1], results[0])


def test_sliceable_variables_have_test_values(two, all_tested):
    shared = theano.shared(ROWS, "shared")
    f = synk.function([], shared.mean(axis=0), sliceable_shareds=[shared])
    synk.scatter(shared, ROWS)
    np.testing.assert_allclose(f(batch_s=slice(2, 4)), ROWS[[2, 3, 8, 9]].mean(axis=0))


def test_collectives_have_test_values(two, all_tested):
    x = with_test_value(tt.dmatrix("x"), ROWS)
    mean = synk.ops.all_reduce(x.mean(axis=0), "avg")
    gathered = synk.ops.all_gather(x)
    from_master = synk.ops.broadcast(x[0])
    outputs = [mean, gathered.sum(), from_master, (tt.grad(mean.sum() + from_master.sum(), x), "gather")]
    f = synk.function([x], outputs)
    found = f(ROWS[:7])
    np.testing.assert_allclose(found[0], ROWS[:7].mean(axis=0))
    np.testing.assert_allclose(found[2], ROWS[0])
