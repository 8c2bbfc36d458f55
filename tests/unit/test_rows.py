"""What graphs tell about how their values depend on the number of rows."""

import numpy as np
import pytest
import theano
import theano.tensor as tt
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

from synkhronos.engines.base import PARTLY_SUM, ROWS, SUM
from synkhronos.engines.analysis.rows import extents

nnet = tt.nnet
x, x2, y, v = tt.dmatrix("x"), tt.dmatrix("x2"), tt.ivector("y"), tt.dvector("v")
image, whole = tt.dtensor4("image"), tt.dmatrix("whole")
w, b = theano.shared(np.ones((4, 3)), "w"), theano.shared(np.ones(3), "b")
filters = theano.shared(np.ones((2, 1, 3, 3)), "filters")
table = theano.shared(np.ones((9, 4)), "table")
rate = theano.shared(0.5, "rate")
INPUTS, AXES = [x, x2, y, v, image, whole], [0, 0, 0, 0, 0, None]

hidden = tt.tanh(tt.dot(x, w) + b)
prediction = nnet.softmax(tt.dot(x, w) + b)
losses = nnet.categorical_crossentropy(prediction, y)
picked = tt.log(prediction)[tt.arange(y.shape[0]), y]
binary = nnet.binary_crossentropy(nnet.sigmoid(x), x2)
squares = tt.sqr(tt.dot(x, w)[:, 0] - v)
normal = (x - x.mean(axis=0)) / tt.sqrt(x.var(axis=0) + 1e-5)
activations = nnet.relu(nnet.conv2d(image, filters))
pooled = tt.signal.pool.pool_2d(activations, (2, 2), ignore_border=True)
mask = tt.cast(MRG_RandomStreams(1).binomial(hidden.shape, p=0.5), "float64")
noise = RandomStreams(1).normal(x.shape)


def gradients(loss):
    return tt.grad(loss, [w, b])


def l2():
    return 0.01 * tt.sqr(w).sum()


KNOWN = {
    SUM: {
        "sum": x.sum(),
        "of one axis": x.sum(axis=0),
        "sum of squares": 0.5 * tt.sqr(x - x2).sum(),
        "scaled": -rate * x.sum() / 3,
        "sum of losses": losses.sum(),
        "of cumulative sums": tt.cumsum(x, axis=1).sum(),
        "picked log probabilities": -tt.sum(picked),
        "sum of binary losses": binary.sum(axis=1).sum(),
        "inner product": tt.dot(v, v),
        "of products": tt.dot(x.T, x2),
        "number of rows": tt.cast(x.shape[0], "float64"),
        "size": tt.cast(x.size, "float64"),
        "norm of a sum": tt.sqrt(tt.sqr(v.sum())),
        "gradient of a sum": gradients(losses.sum())[0],
        "gradient of a sum for the bias": gradients(tt.sqr(hidden).sum())[1],
        "of a convolution": activations.sum(),
        "of pooled images": pooled.flatten(2).sum(axis=0),
        "of masked units": (hidden * mask).sum(),
        "with noise": (x + noise).sum(),
        "of looked up rows": table[y].sum(),
        "mean over columns of sums": x.sum(axis=0).mean(),
        "variational": -0.5 * tt.sum(1 + hidden - tt.sqr(hidden) - tt.exp(hidden)) + binary.sum(),
        "mean times rows": x.mean() * x.shape[0],
        "product of powers of a sum": tt.stack([tt.sqr(x.sum()), 1 / x.sum()]).prod(),
    },
    PARTLY_SUM: {
        "with a penalty": losses.sum() + l2(),
        "with a constant": x.sum() + 1,
    },
    ROWS: {
        "input": x, "softmax": prediction, "losses": losses, "row sums": x.sum(axis=1),
        "norms of rows": tt.sqrt(tt.sqr(x).sum(axis=1)), "picked": picked, "columns": x[:, 1:3],
        "one column": x[:, 0], "images": pooled, "flat images": pooled.flatten(2),
        "reshaped": x.reshape((x.shape[0], 2, -1)), "zeros": tt.zeros_like(x),
        "root of zeros": tt.sqrt(tt.zeros_like(x)),
        "ones": tt.ones((x.shape[0], 3)), "largest": x.max(axis=1), "normalized": normal,
        "dropout": hidden * mask, "looked up": table[y], "of a whole input": tt.dot(x, whole),
        "cumulative sums": tt.cumsum(x, axis=1), "sorted within rows": tt.sort(x, axis=-1),
        "in a loop": theano.scan(lambda c, s: tt.tanh(c) + s, x.T, tt.zeros_like(x[:, 0]))[0][-1],
        "transposed": x.T, "centred": x - x.mean(axis=1, keepdims=True),
    },
    None: {
        "mean": x.mean(),
        "mean of an axis": x.mean(axis=0),
        "mean of losses": losses.mean(),
        "picked mean": -tt.mean(picked),
        "mean and penalty": binary.mean() + l2(),
        "own mean": x.sum() / x.shape[0],
        "sum over size": x.sum() / tt.cast(x.size, "float64"),
        "variance": x.var(),
        "batch normalization": nnet.bn.batch_normalization(x, b[0], b[0], x.mean(0), x.std(0)).mean(),
        "masked mean": (losses * v).sum() / v.sum(),
        "normalized mean": (normal**2).mean(),
        "gradient of a mean": gradients(losses.mean())[0],
        "gradient of a mean for the bias": gradients(losses.mean())[1],
        "gradient of a mean of squares": tt.grad(squares.mean(), w),
        "gradient with a penalty": gradients(tt.sqr(hidden).mean() + l2())[0],
        "gradient of rectified units": tt.grad(nnet.relu(tt.dot(x, w)).mean(), w),
        "gradient by switch": tt.grad(tt.switch(hidden > 0, hidden, 0).mean(), w),
        "gradient of a convolution": tt.grad(activations.mean(), filters),
        "gradient of pooled images": tt.grad(tt.sqr(pooled).mean(), filters),
        "gradient of masked units": tt.grad(tt.sqr(hidden * mask).mean(), w),
        "gradient of the sum of means": tt.grad(tt.sqr(hidden).mean(axis=0).sum(), w),
        "gradient of looked up rows": tt.grad(tt.sqr(table[y]).mean(), table),
        "flat gradient": tt.concatenate([one.flatten() for one in gradients(losses.mean())]),
        "accuracy": tt.eq(prediction.argmax(axis=1), y).mean(dtype="float64"),
        "of parameters": w.sum(),
        "of a whole input": whole.sum(),
        "first row": x[0],
        "maximum": x.max(),
        "product of rows": tt.dot(x, x.T).sum(),
        "rank dependent mean": (x.sum() / (v.sum() + 1)).mean(),
        "square of a sum": tt.sqr(x.sum()),
        "scan": theano.scan(lambda row, total: total + row, x, tt.zeros_like(x[0]))[0][-1],
        "one of two": tt.stack([x.sum(), x.mean()])[1],
        "sorted": tt.sort(v)[0],
        "cumulative sum over the rows": tt.cumsum(x, axis=0).sum(),
    },
}  # fmt: skip
CASES = [(kind, name, one) for kind, cases in KNOWN.items() for name, one in cases.items()]


@pytest.mark.parametrize(
    "kind, expression", [(kind, one) for kind, _, one in CASES], ids=[f"{k} {n}" for k, n, _ in CASES]
)
def test_what_a_graph_tells_about_rows(kind, expression):
    assert extents(INPUTS, AXES, [expression]) == [kind]


def test_without_split_inputs_nothing_depends_on_rows():
    assert set(extents(INPUTS, [None] * 6, [one for *_, one in CASES])) == {None}


def test_what_is_called_a_sum_doubles_with_the_rows_and_what_is_known_otherwise_does_not():
    """The claims, against numbers: every row twice."""
    random = np.random.RandomState(0)
    once = [random.rand(6, 4), random.rand(6, 4), random.randint(0, 3, 6).astype("int32"),
            random.rand(6), random.rand(6, 1, 8, 8), random.rand(4, 4)]  # fmt: skip
    twice = [np.concatenate([one, one]) for one in once[:-1]] + once[-1:]
    left_out = ("mask", "noise", "dropout", "convolution", "images")  # random, or need C code
    chosen = [one for one in CASES if one[0] and not any(word in one[1] for word in left_out)]
    means = ("gradient of a mean", "gradient of rectified units", "variance", "own mean")
    chosen += [(None, name, KNOWN[None][name]) for name in means]
    f = theano.function(INPUTS, [one for *_, one in chosen], mode="FAST_COMPILE",
                        on_unused_input="ignore")  # fmt: skip
    for (kind, name, _), single, double in zip(chosen, f(*once), f(*twice)):
        if kind == ROWS:
            assert single.shape != double.shape, name
        elif kind == SUM:
            np.testing.assert_allclose(double, 2 * single, err_msg=name)
        elif kind == PARTLY_SUM:
            assert not np.allclose(double, single) and not np.allclose(double, 2 * single), name
        else:
            np.testing.assert_allclose(double, single, err_msg=name)
