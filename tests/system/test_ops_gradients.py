"""Tests of the gradients of collectives in graphs, by finite differences of the loss of all ranks."""

import numpy as np
import pytest
from compilers import NullTypeGradError, Rop, compiler, tt

import synkhronos as synk
from synkhronos.extensions import train

ops = synk.ops
STEP = 1e-5
ROWS = np.random.RandomState(0).normal(size=(7, 2))  # of three ranks: 3, 2 and 2
OTHERS = [pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 4)]

COLLECTIVES = {
    **{op: lambda v, loss_op, op=op: ops.all_reduce(v, op, loss_op=loss_op)
       for op in ("sum", "avg", "min", "max")},
    "gather": lambda v, loss_op: ops.all_gather(v, loss_op=loss_op),
    "broadcast": lambda v, loss_op: ops.broadcast(v, loss_op=loss_op),
    "several": lambda v, loss_op: ops.all_gather(
        v * ops.all_reduce(tt.exp(v), "avg", loss_op=loss_op)
        + ops.broadcast(tt.sqr(v), loss_op=loss_op), loss_op=loss_op),
}  # fmt: skip


@pytest.fixture(scope="module", params=[3, *OTHERS], ids="{} rank(s)".format)
def size(open_world, request):
    open_world(request.param, master_rank=request.param // 2)
    return request.param


@pytest.fixture
def world(size, in_python):
    return size


def set_values(v, values):
    for rank, value in enumerate(values):
        synk.set_value(rank, v, value)


def differences(f, v, values):
    """Return, for each rank, the derivatives of the loss by the items of its own replica."""
    found = []
    for rank, value in enumerate(values):
        slopes = np.empty_like(value)
        for index in np.ndindex(value.shape):
            losses = []
            for step in (STEP, -STEP):
                changed = value.copy()
                changed[index] += step
                synk.set_value(rank, v, changed)
                losses.append(f(ROWS)[0])
            slopes[index] = (losses[0] - losses[1]) / (2 * STEP)
        synk.set_value(rank, v, value)
        found.append(slopes)
    return found


def loss_of(v, x, collective, loss_op):
    combined = COLLECTIVES[collective](v, loss_op)
    return (tt.sin(combined) * x.mean()).sum() + (tt.sqr(combined) * x[0, 0]).mean() + (v * x[-1]).sum()


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("loss_op", ["avg", "sum"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_gradient_is_that_of_the_losses_of_all_ranks(world, collective, loss_op, order):
    """Each rank has its own rows and its own values, of unequal numbers where they are gathered."""
    v, x = compiler.shared(np.zeros((1, 2)), name="v"), tt.dmatrix("x")
    loss = loss_of(v, x, collective, loss_op)
    if order == 2:
        loss = tt.sqr(tt.grad(loss, v)).sum()
    f = synk.function([x], [(loss, loss_op), (tt.grad(loss, v), "gather")])
    rng = np.random.RandomState(1)
    is_even = collective != "gather"
    values = [rng.normal(size=(2 if is_even else rank + 1, 2)) for rank in range(world)]
    set_values(v, values)
    gradients = f(ROWS)[1]
    expected = differences(f, v, values)
    if loss_op == "avg":
        numbers = map(len, np.array_split(ROWS, world))
        expected = [each * len(ROWS) / number for each, number in zip(expected, numbers)]
    np.testing.assert_allclose(gradients, np.concatenate(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype, rtol", [("float64", 1e-10), ("float32", 1e-4)])
def test_the_average_of_the_gradients_is_the_serial_one_for_unequal_numbers_of_rows(world, dtype, rtol):
    v, x = compiler.shared(np.array([0.5, 2.0], dtype), name="v"), tt.matrix("x", dtype=dtype)
    for loss_op, mean in (("avg", lambda y: y.mean()), ("sum", lambda y: y.sum())):
        centre = ops.all_reduce(tt.exp(x * v).mean(0), "avg", loss_op=loss_op)
        largest = ops.all_reduce((x * v).max(0), "max", loss_op=loss_op)
        others = tt.tanh(ops.all_gather(x * v, loss_op=loss_op)).mean(0)
        loss = mean(tt.sqr(x * v - centre) * largest + others)
        f = synk.function([x], [(loss, loss_op), (tt.grad(loss, v), loss_op)])
        for rows in (ROWS, ROWS[:4], ROWS[:6]):
            rows = rows.astype(dtype)
            for result, expected in zip(f(rows), f.as_theano(rows)):
                assert result.dtype == dtype
                np.testing.assert_allclose(result, expected, rtol)


def test_the_directional_derivative_of_linear_collectives_is_that_of_differences(world):
    x, d = tt.dmatrix("x"), tt.dmatrix("d")
    y = ops.all_reduce(x.sum(0)) * ops.all_reduce(x.mean(0), "avg")
    y += ops.all_gather(x)[0] + ops.broadcast(x[0])
    f = synk.function([x, d], [(y, None), (Rop(y, x, d), None)])
    direction = np.random.RandomState(3).normal(size=ROWS.shape)
    above, below = (f(ROWS + sign * STEP * direction, direction)[0] for sign in (1, -1))
    np.testing.assert_allclose(f(ROWS, direction)[1], (above - below) / (2 * STEP), rtol=1e-6)


def test_what_has_no_gradient_is_refused(world):
    v = compiler.shared(np.ones(2))
    with pytest.raises(NullTypeGradError, match="all_reduce: 'prod' has no gradient; use exp"):
        tt.grad(ops.all_reduce(v, "prod").sum(), v)
    with pytest.raises(NotImplementedError, match="'max' has no R operation"):
        Rop(ops.all_reduce(v, "max"), v, v)


def test_integers_have_a_gradient_of_zero(world):
    x, v = tt.dmatrix("x"), compiler.shared(np.ones(2), name="v")
    count = ops.all_reduce(tt.cast(v, "int64").sum()) + ops.all_gather(tt.cast(v, "int8")).sum()
    loss = (v * count * x.mean()).sum()
    f = synk.function([x], (tt.grad(loss, v), "avg"))  # it depends on the number of ranks
    np.testing.assert_allclose(f(ROWS), [4 * world * ROWS.mean()] * 2)


def descend(gradients, params):
    return [(param, param - 0.01 * g) for param, g in zip(params, gradients)]


RULE = [("avg", lambda x: x.mean()), ("sum", lambda x: x.sum())]


@pytest.mark.parametrize("loss_op, total", RULE, ids=["avg", "sum"])
@pytest.mark.parametrize("num_slices", [1, 2])
def test_a_training_step_equals_the_serial_one(world, loss_op, total, num_slices):
    """Statistics are computed over the ranks' first slices, and so on; here they are equal."""
    x = tt.dmatrix("x")

    def script():
        v, average = compiler.shared(np.array([0.5, 2.0]), "v"), compiler.shared(np.zeros(2), "average")
        centre = ops.all_reduce((x * v).mean(0), "avg", loss_op=loss_op)
        loss = total(tt.sqr(x * v - centre) + tt.sqr(x + v)) + 0.1 * tt.sqr(v).sum()
        return v, average, loss, [(average, 0.9 * average + 0.1 * centre)]

    rows = ROWS[:7] if num_slices == 1 else np.tile(ROWS[:2], (24, 1))
    outcomes = []
    for make in (train.make_train_function, train.make_train_function_theano):
        v, average, loss, updates = script()
        step = make(loss, [v], x, None, descend, updates=updates, loss_op=loss_op)
        options = {"num_slices": num_slices} if make is train.make_train_function else {}
        losses = [step(rows, **options) for _ in range(3)]
        if make is train.make_train_function:
            assert synk.in_sync([v, average])
        outcomes.append([*losses, v.get_value(), average.get_value()])
    for result, expected in zip(*outcomes):
        np.testing.assert_allclose(result, expected, rtol=1e-10)


def test_a_step_refuses_collectives_for_losses_that_are_combined_otherwise(world):
    x, v = tt.dmatrix("x"), compiler.shared(np.ones(2), name="v")
    loss = tt.sqr(x * v - ops.all_reduce((x * v).mean(0), "avg")).sum()

    refused = "built with loss_op='avg', but the step has loss_op='sum'"
    with pytest.raises(ValueError, match=refused):
        train.make_train_function(loss, [v], x, None, descend, loss_op="sum")
    with pytest.raises(ValueError, match=refused):
        updates = [(v, v - tt.grad(loss, v))]
        train.parallel_function([x], loss, updates=updates, loss=loss, loss_op="sum")
