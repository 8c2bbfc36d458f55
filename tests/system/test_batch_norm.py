"""Tests of batch normalization over all ranks."""

import numpy as np
import pytest
import theano
import theano.tensor as tt
from theano.tensor.nnet import bn

import synkhronos as synk
from synkhronos.extensions import batch_norm, train

IMAGES = np.random.RandomState(0).normal(3, 2, size=(7, 2, 3, 4))
OTHERS = [pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 4)]


@pytest.fixture(scope="module", params=[3, *OTHERS], ids="{} rank(s)".format)
def world(open_world, request):
    open_world(request.param)


def by_theano(x, gamma, beta, axes, old):
    mode = theano.compile.get_mode("FAST_COMPILE")
    variable = tt.TensorType(x.dtype, [False] * x.ndim)()
    outputs = bn.batch_normalization_train(
        variable, gamma, beta, axes, 1e-3, 0.2, running_mean=old[0], running_var=old[1])  # fmt: skip
    return theano.function([variable], list(outputs), mode=mode)(x)


@pytest.mark.parametrize("axes", ["per-activation", "spatial", (0, 3)])
@pytest.mark.parametrize("n_rows", [7, 2])
def test_it_computes_what_theano_computes_on_all_rows(world, in_python, axes, n_rows):
    chosen = {"per-activation": (0,), "spatial": (0, 2, 3)}.get(axes, axes)
    shape = [extent for axis, extent in enumerate(IMAGES.shape) if axis not in chosen]
    rng = np.random.RandomState(1)
    gamma, beta, *old = (rng.uniform(0.5, 2, shape) for _ in range(4))
    averages = [theano.shared(value) for value in old]
    x = tt.dtensor4("x")
    out, mean, invstd, *new = batch_norm.batch_normalization_train(
        x, gamma, beta, axes, 1e-3, 0.2, running_mean=averages[0], running_var=averages[1])  # fmt: skip
    updates = list(zip(averages, new))
    f = synk.function([x], [(out, "gather"), (mean, None), (invstd, None)], updates=updates)
    rows = IMAGES[:n_rows]
    expected = by_theano(rows, gamma, beta, axes, old)
    results = f(rows)
    for result, one in zip([*results, *(one.get_value() for one in averages)], expected):
        np.testing.assert_allclose(result, one, rtol=1e-9)
    assert synk.in_sync(averages)
    alone = theano.function([x], [out, mean, invstd])(rows)
    for result, one in zip(alone, expected):
        np.testing.assert_allclose(result, one, rtol=1e-9)


@pytest.mark.parametrize("loss_op", ["avg", "sum"])
@pytest.mark.parametrize("n_rows", [7, 3])
def test_gradients_equal_those_of_one_process(world, in_python, loss_op, n_rows):
    x = tt.dtensor4("x")
    w, gamma, beta = (theano.shared(np.array(value)) for value in ([0.5, 2.0], [1.5, -1.0], [0.1, 0.3]))
    y = tt.tanh(x * w.dimshuffle("x", 0, "x", "x") / 3)
    out, *_ = batch_norm.batch_normalization_train(y, gamma, beta, "spatial", loss_op=loss_op)
    losses = tt.sqr(tt.sin(out) - x).sum(axis=(1, 2, 3))
    loss = losses.mean() if loss_op == "avg" else losses.sum()
    gradients = tt.grad(loss, [w, gamma, beta])
    f = synk.function([x], [(one, loss_op) for one in (loss, *gradients)])
    reference = bn.batch_normalization_train(y, gamma, beta, "spatial")[0]
    losses = tt.sqr(tt.sin(reference) - x).sum(axis=(1, 2, 3))
    loss = losses.mean() if loss_op == "avg" else losses.sum()
    mode = theano.compile.get_mode("FAST_COMPILE")
    g = theano.function([x], [loss, *tt.grad(loss, [w, gamma, beta])], mode=mode)
    for result, expected in zip(f(IMAGES[:n_rows]), g(IMAGES[:n_rows])):
        np.testing.assert_allclose(result, expected, rtol=1e-8, atol=1e-12)
    assert len(f.check(IMAGES[:n_rows]).differences) == 4


def test_a_layer_exchanges_four_vectors_in_a_step(world):
    x, w = tt.dtensor4("x"), theano.shared(np.array([0.5, 2.0]))
    y = x * w.dimshuffle("x", 0, "x", "x")
    out, *_ = batch_norm.batch_normalization_train(y, np.ones(2), np.zeros(2), "spatial")
    gradient = tt.grad(tt.sqr(out - x).mean(), w)
    f = synk.function([x], gradient, mode=theano.Mode("vm", "fast_run"))
    nodes = f.maker.fgraph.apply_nodes
    assert sum(hasattr(node.op, "is_same_everywhere") for node in nodes) == 4


@pytest.mark.filterwarnings("ignore:.*differs from one process")  # slices have statistics of their own
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_row_leaves_the_running_variance_as_it_is(world, in_python, dtype):
    x, ones = tt.matrix("x", dtype=dtype), np.ones(2, dtype)
    mean, variance = theano.shared(0 * ones, "mean"), theano.shared(3 * ones, "variance")
    _, _, _, *new = batch_norm.batch_normalization_train(
        x, ones, ones, running_mean=mean, running_var=variance
    )
    update = synk.function([x], [], updates=list(zip([mean, variance], new)))
    update(np.array([[10, 20]], dtype))
    np.testing.assert_allclose(synk.gather(mean), [[1, 2]] * synk.size())
    np.testing.assert_array_equal(synk.gather(variance), [[3, 3]] * synk.size())


@pytest.mark.filterwarnings("ignore:(?s).*leave out num_slices:synkhronos.SynkhronosWarning")
def test_running_averages_stay_equal_over_slices_and_uneven_shares(world, in_python):
    x = tt.dtensor4("x")
    averages = [theano.shared(np.zeros(2), "mean"), theano.shared(np.ones(2), "variance")]
    w = theano.shared(np.array([0.5, 2.0]), "w")
    out, _, _, *new = batch_norm.batch_normalization_train(
        x * w.dimshuffle("x", 0, "x", "x"), np.ones(2), np.zeros(2), "spatial",
        running_mean=averages[0], running_var=averages[1])  # fmt: skip

    def descend(gradients, params):
        return [(param, param - 0.1 * g) for param, g in zip(params, gradients)]

    updates = list(zip(averages, new))
    step = train.make_train_function(tt.sqr(out - x).mean(), [w], x, None, descend, updates=updates)
    alone = synk.function([x], (out, "gather"), updates=updates)
    for rows, slices in ((IMAGES, 1), (IMAGES, 3), (IMAGES[:4], 2), (IMAGES[:2], 1)):
        step(rows, num_slices=slices)
        assert synk.in_sync([w, *averages])
        alone(rows, num_slices=slices)
        assert synk.in_sync(averages)


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"axes": (1, 2)}, "and among them 0, whose rows the ranks share"),
        ({"axes": (0, 4)}, "distinct axes below 4"),
        ({"axes": "channels"}, "expected 'per-activation', 'spatial' or numbers, got 'channels'"),
        ({"gamma": np.ones((2, 3))}, "gamma: expected 1 dimensions, one for each axis"),
        ({"running_mean": np.ones(2)}, "both running_mean and running_var"),
    ],
)
def test_wrong_arguments_are_refused(keywords, message):
    given = {"gamma": np.ones(2), "beta": np.ones(2), "axes": "spatial", **keywords}
    with pytest.raises(ValueError, match=message):
        batch_norm.batch_normalization_train(tt.dtensor4("x"), **given)
    with pytest.raises(TypeError, match="expected a float tensor"):
        batch_norm.moments(tt.lmatrix("x"))
