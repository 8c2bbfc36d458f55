"""Tests of collectives in graphs, on this run's devices."""

import numpy as np
import pytest
import theano
import theano.tensor as tt
from theano.gpuarray.type import GpuArrayType

import synkhronos as synk
from synkhronos.extensions import batch_norm, train

ops = synk.ops
ROWS = np.random.RandomState(0).normal(size=(7, 3)).astype("float32")
LARGE = 5000  # items, more than what is sent along with the exchange

pytestmark = pytest.mark.usefixtures("world")


def shared(value, name="w"):
    return theano.shared(np.asarray(value, "float32"), name)


def on_all_ranks(variable):
    return variable.dimshuffle("x", *range(variable.ndim)), "gather"


def collectives_in(f):
    nodes = f.maker.fgraph.toposort()
    return [node for node in nodes if hasattr(node.op, "is_same_everywhere")]


def is_on_device(node):
    return isinstance(node.inputs[1].type, GpuArrayType)


@pytest.mark.parametrize("width", [3, LARGE])
def test_collectives_of_arrays_on_the_device_stay_there(width):
    x, w = tt.fmatrix("x"), shared(np.linspace(0.5, 2, width))
    y = tt.tanh(x * w)
    outputs = [
        ops.all_reduce(y.sum(0)),
        ops.all_reduce(y.mean(0), "avg"),
        ops.all_reduce(y.max(0), "max"),
        ops.all_reduce(y[-1], "min"),
        ops.all_gather(y),
    ]
    f = synk.function([x], [on_all_ranks(one) for one in outputs])
    assert len(collectives_in(f)) == 5 and all(map(is_on_device, collectives_in(f)))
    rows = np.random.RandomState(1).normal(size=(9, width)).astype("float32")
    for chosen in (rows, rows[:1]):  # of one row, most ranks have none
        values = np.tanh(chosen * w.get_value())
        lasts = [share[-1] for share in np.array_split(values, synk.size()) if len(share)]
        expected = [values.sum(0), values.mean(0), values.max(0), np.min(lasts, 0), values]
        for each, one in zip(f(chosen), expected):
            for result in each:
                np.testing.assert_allclose(result, one, rtol=1e-4, atol=1e-5)


def test_the_masters_value_is_broadcast_on_the_device():
    x, w = tt.fmatrix("x"), shared(np.ones(3))
    f = synk.function([x], on_all_ranks(ops.broadcast((x * w)[:1])))
    assert all(map(is_on_device, collectives_in(f)))
    of_master = np.array_split(ROWS, synk.size())[synk.world.world.current_world().master_rank]
    np.testing.assert_array_equal(f(ROWS), [of_master[:1]] * synk.size())


@pytest.mark.parametrize("loss_op", ["avg", "sum"])
def test_gradients_are_the_serial_ones(loss_op):
    x, w = tt.fmatrix("x"), shared([0.5, 1.0, -0.25])
    y = x * w
    centre = ops.all_reduce(y.mean(0), "avg", loss_op=loss_op)
    largest = ops.all_reduce(y.max(0), "max", loss_op=loss_op)
    of_all = tt.tanh(ops.all_gather(y, loss_op=loss_op)).mean(0)
    loss = tt.sqr(y - centre) * largest + of_all
    loss = loss.mean() if loss_op == "avg" else loss.sum()
    f = synk.function([x], [(loss, loss_op), (tt.grad(loss, w), loss_op)])
    assert all(map(is_on_device, collectives_in(f)))
    for result, expected in zip(f(ROWS), f.as_theano(ROWS)):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    assert len(f.check(ROWS).differences) == 2


def test_a_training_step_with_batch_norm_over_all_ranks_equals_the_serial_one():
    x = tt.fmatrix("x")

    def script():
        w, average, variance = shared([0.5, 1.0, -0.25]), shared(np.zeros(3)), shared(np.ones(3))
        out, _, _, *new = batch_norm.batch_normalization_train(
            tt.tanh(x * w), tt.ones_like(w), tt.zeros_like(w),
            running_mean=average, running_var=variance)  # fmt: skip
        loss = tt.sqr(out - x).mean()
        return loss, w, list(zip([average, variance], new))

    def descend(gradients, params):
        return [(param, param - np.float32(0.1) * g) for param, g in zip(params, gradients)]

    outcomes = []
    for make in (train.make_train_function, train.make_train_function_theano):
        loss, w, updates = script()
        step = make(loss, [w], x, None, descend, updates=updates)
        losses = [step(ROWS) for _ in range(3)]
        outcomes.append([losses, w.get_value(), *(target.get_value() for target, _ in updates)])
        if make is train.make_train_function:
            assert synk.in_sync([target for target, _ in updates])
    for result, expected in zip(*outcomes):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_slices_are_combined_over_all_ranks():
    x, average = tt.fmatrix("x"), shared(np.zeros(3))
    mean = ops.all_reduce((x + 0 * average).mean(0), "avg")
    f = synk.function([x], [mean], updates=[(average, mean)])
    np.testing.assert_allclose(f(ROWS, num_slices=3)[0], ROWS.mean(0), rtol=1e-4, atol=1e-6)
    assert synk.in_sync(average)
