"""How scripts write losses, data and updates: a table of idioms, each as a graph with its data.

Each function of `IDIOMS` returns an `Idiom`, with shared variables of its own each time. `trials` runs
one in the three ways in which a script can be ported, next to the compiler's own function.
"""

import warnings
from typing import Any, Dict, List, NamedTuple, Sequence

import lasagne
import numpy as np
import theano
import theano.sparse
import theano.tensor as tt
from theano.sandbox.rng_mrg import MRG_RandomStreams

import synkhronos as synk
from synkhronos.extensions import batch_norm, train

N, D, K, TIME = 12, 3, 4, 5  # rows, columns, classes, time steps
RNG = np.random.RandomState(11)
X, Y = RNG.normal(size=(N, D)), 3 * RNG.normal(size=N)
LABELS = RNG.randint(0, K, N).astype("int32")
MASK = (RNG.uniform(size=(N, D)) < np.linspace(0.2, 1, N)[:, None]).astype("float64")
IMAGES = RNG.normal(size=(N, 1, 6, 6))
SEQUENCES = RNG.normal(size=(N, TIME, D))
STEPS = 2


class Idiom(NamedTuple):
    """A script's function, and the data of one call.

    In place of plain gradient descent it may have `updates`, and in place of the loss a plain function
    may have an `output`. `options` are further arguments of the functions of `train`, such as
    ``loss_op``, and `before` is what the script does before each call. `is_random` says whether results
    depend on random numbers, which other ranks draw, and `mode` how it has to be compiled.
    """

    inputs: List[Any]
    loss: Any
    params: List[Any]
    data: List[Any]
    givens: Dict[Any, Any] = {}
    updates: Sequence[Any] = ()
    options: Dict[str, Any] = {}
    output: Any = None
    before: Any = None
    is_random: bool = False
    mode: Any = None


def weights(*shape, name="w"):
    values = np.linspace(-0.5, 0.7, int(np.prod(shape)))
    return theano.shared(values.reshape(shape), name)


def linear(loss_of, data=(X, Y), **more):
    """An idiom of a linear model: the loss is computed from the errors of the rows."""
    x, y, w = tt.dmatrix("x"), tt.dvector("y"), weights(D)
    more = {name: value(w) if callable(value) else value for name, value in more.items()}
    return Idiom([x, y], loss_of(tt.dot(x, w) - y, x, y, w), [w], list(data), **more)


def classified(loss_of, **more):
    """An idiom of a classifier."""
    x, y, w = tt.dmatrix("x"), tt.ivector("y"), weights(D, K)
    return Idiom([x, y], loss_of(tt.nnet.softmax(tt.dot(x, w)), x, y, w), [w], [X, LABELS], **more)


def convolved(loss_of, input_shape):
    x, w = tt.tensor4("x", dtype="float64"), weights(2, 1, 3, 3)
    maps = tt.nnet.conv2d(x, w, input_shape=input_shape, filter_shape=(2, 1, 3, 3))
    mode = theano.Mode("cvm", "fast_compile")  # convolutions have no Python code
    return Idiom([x], loss_of(maps), [w], [IMAGES], mode=mode)


def recurrent(sequences, wrap, first, mean_of=lambda h: tt.sqr(h).mean(), data=None):
    w = weights(D, D)
    x = tt.dtensor3("x")
    hidden, _ = theano.scan(
        lambda x_t, h: tt.tanh(x_t + tt.dot(h, w)), sequences=sequences(x), outputs_info=first(x)
    )
    return Idiom([wrap(x)], mean_of(hidden), [w], [SEQUENCES if data is None else data])


def selected(rows_of, targets_of=None, data=(1,), index=None):
    """Rows of shared data that an index selects."""
    x, y, w = tt.dmatrix("x"), tt.dvector("y"), weights(D)
    i = tt.lscalar("i") if index is None else index
    shared = theano.shared(X, "data")
    givens = {x: rows_of(shared, i)}
    inputs, loss = [i], tt.sqr(tt.dot(x, w) - 1).mean()
    if targets_of is not None:
        givens[y] = targets_of(theano.shared(Y, "targets"), i)
        loss = tt.sqr(tt.dot(x, w) - y).mean()
    return Idiom(inputs, loss, [w], list(data), givens)


def with_output(made, output):
    """The same idiom with another output of a plain function."""
    return made._replace(output=output(made))


def masked(loss_of, target=1, mask=MASK):
    """An idiom of a loss that is computed from squares and a mask."""
    x, m, w = tt.dmatrix("x"), tt.dmatrix("m"), weights(D)
    return Idiom([x, m], loss_of(tt.sqr(x * w - target), m), [w], [X, mask])


def ignored():
    """An idiom of a classifier that ignores the rows of one class."""

    def loss_of(p, x, y, w):
        known = tt.cast(tt.neq(y, 0), "float64")
        return (tt.nnet.categorical_crossentropy(p, y) * known).sum() / known.sum()

    return classified(loss_of)


def class_weighted():
    """An idiom of a classifier with a weight for each class."""
    of_class = theano.shared(np.linspace(0.5, 2, K), "of_class")

    def loss_of(p, x, y, w):
        each = of_class[y]
        return (tt.nnet.categorical_crossentropy(p, y) * each).sum() / each.sum()

    return classified(loss_of)


def stepped(updates_of, *more):
    """An idiom of least squares with updates of its own, and with further shared variables."""
    made = linear(lambda e, *_: tt.sqr(e).mean())
    updates = updates_of(made.loss, made.params[0], made.inputs[0], *more)
    return made._replace(params=[*made.params, *more], updates=list(updates))


def predicted(output_of):
    """An idiom of a classifier whose output is computed from the classes."""
    made = classified(lambda p, x, y, w: tt.nnet.categorical_crossentropy(p, y).mean())
    classes = tt.argmax(tt.dot(made.inputs[0], made.params[0]), axis=1)
    return made._replace(output=output_of(classes, made.inputs[1]))


def window(rows, i):
    return rows[i * 4 : (i + 1) * 4]


def held_rows(options_of):
    """An idiom of a shared variable that `set_value` changes before each call."""
    held, w = theano.shared(np.zeros((N, D)), "held"), weights(D)
    batches = iter([X, X + 1, X - 1])
    loss = tt.sqr(tt.dot(held, w) - 1).mean()
    return Idiom(
        [], loss, [w], [], options=options_of(held), before=lambda: held.set_value(next(batches))
    )


def considered_constant():
    fixed = tt.dvector
    x, y, w = tt.dmatrix("x"), fixed("y"), weights(D)
    predicted = tt.dot(x, w)
    target = predicted * 0.5 + y
    loss = tt.sqr(predicted - target).mean()
    gradient = tt.grad(loss, w, consider_constant=[target])
    return Idiom([x, y], loss, [w], [X, Y], updates=[(w, w - 0.1 * gradient)],
                 options={"gradients": [gradient], "params": [w]})  # fmt: skip


def normalized_over_all_ranks():
    def loss(e, x, y, w):
        mean, variance = batch_norm.moments(x * w, [0])[:2]
        return tt.tanh((x * w - mean) / tt.sqrt(variance + 1e-3) + y.dimshuffle(0, "x")).mean()

    return linear(loss)


def sparse_embedding():
    i, w = tt.ivector("i"), weights(K, 2, name="E")
    chosen = theano.sparse_grad(w[i])
    loss = tt.sqr(chosen.sum(axis=1) - 1).mean()
    gradient = theano.sparse.dense_from_sparse(tt.grad(loss, w))
    return Idiom([i], loss, [w], [LABELS], updates=[(w, w - 0.1 * gradient)])


def embedding():
    i, w = tt.ivector("i"), weights(K, 2, name="E")
    return Idiom([i], tt.sqr(w[i].sum(axis=1) - 1).mean(), [w], [LABELS])


def stored_gradients():
    x, y, w = tt.dmatrix("x"), tt.dvector("y"), weights(D)
    loss = tt.sqr(tt.dot(x, w) - y).mean()
    gradient = tt.grad(loss, w)
    stored, squares = (theano.shared(np.zeros(D), name) for name in ("w_grad", "w_rgrad2"))
    updates = [(stored, gradient), (squares, 0.95 * squares + 0.05 * gradient**2)]
    return Idiom([x, y], loss, [stored, squares], [X, Y], updates=updates)


def rate_among_the_inputs():
    x, y, w, rate = tt.dmatrix("x"), tt.dvector("y"), weights(D), tt.dscalar("rate")
    loss = tt.sqr(tt.dot(x, w) - y).mean()
    updates = [(w, w - rate * tt.grad(loss, w))]
    return Idiom([x, y, rate], loss, [w], [X, Y, 0.1], updates=updates, output=loss + 0 * rate)


def lasagnes_input_layer():
    x, y = tt.dmatrix("x"), tt.dvector("y")
    layer = lasagne.layers.InputLayer((N, D), x)
    layer = lasagne.layers.DenseLayer(layer, 2, W=weights(D, 2), b=None)
    loss = tt.sqr(lasagne.layers.get_output(layer).sum(axis=1) - y).mean()
    return Idiom([x, y], loss, lasagne.layers.get_all_params(layer), [X, Y])


def window_beside_rows():
    x, y, i, w = tt.dmatrix("x"), tt.dvector("y"), tt.lscalar("i"), weights(D)
    shared = theano.shared(X, "data")
    loss = tt.sqr(tt.dot(x, w) - y).mean()
    return Idiom([y, i], loss, [w], [Y[:4], 1], {x: shared[i * 4 : (i + 1) * 4]})


def changed_rate():
    x, y, w = tt.dmatrix("x"), tt.dvector("y"), weights(D)
    rate, rates = theano.shared(0.1, "rate"), iter([0.1, 0.05, 0.025])
    loss = tt.sqr(tt.dot(x, w) - y).mean()
    updates = [(w, w - rate * tt.grad(loss, w))]
    return Idiom([x, y], loss, [w], [X, Y], updates=updates,
                 output=loss * rate, before=lambda: rate.set_value(next(rates)))  # fmt: skip


IDIOMS = {
    # Means over the rows
    "a mean of squares": lambda: linear(lambda e, *_: tt.sqr(e).mean()),
    "a mean over all elements, not only rows": lambda: linear(
        lambda e, x, y, w: tt.sqr(x * w - y.dimshuffle(0, "x")).mean()
    ),
    "a sum over the columns, a mean over the rows": lambda: linear(
        lambda e, x, y, w: tt.sqr(x * w - y.dimshuffle(0, "x")).sum(axis=1).mean()
    ),
    "a sum divided by x.shape[0]": lambda: linear(lambda e, x, *_: tt.sqr(e).sum() / x.shape[0]),
    "a sum divided by a cast of x.shape[0]": lambda: linear(
        lambda e, x, *_: tt.sqr(e).sum() / tt.cast(x.shape[0], "float64")
    ),
    "binary cross-entropy": lambda: linear(
        lambda e, x, y, w: tt.nnet.binary_crossentropy(tt.nnet.sigmoid(tt.dot(x, w)), y).mean(),
        (X, (Y > 0).astype("float64")),
    ),
    "-mean(log(p)[arange(n), y])": lambda: classified(
        lambda p, x, y, w: -tt.mean(tt.log(p)[tt.arange(y.shape[0]), y])
    ),
    "categorical_crossentropy(p, y).mean()": lambda: classified(
        lambda p, x, y, w: tt.nnet.categorical_crossentropy(p, y).mean()
    ),
    "a mean and an L2 penalty": lambda: linear(
        lambda e, x, y, w: tt.sqr(e).mean() + 0.1 * tt.sqr(w).sum()
    ),
    "a mean and an L1 penalty": lambda: linear(lambda e, x, y, w: tt.sqr(e).mean() + 0.1 * abs(w).sum()),
    "a hinge loss of each row": lambda: linear(lambda e, *_: tt.maximum(0, 1 - e).mean()),
    "a mean within each row, by a mask, and then over the rows": lambda: masked(
        lambda e, m: ((e * m).sum(axis=1) / m.sum(axis=1)).mean(), 0, np.maximum(MASK, np.eye(D)[0])
    ),
    "a target without a gradient (disconnected_grad)": lambda: linear(
        lambda e, x, y, w: tt.sqr(e - theano.gradient.disconnected_grad(e) * 0.5).mean()
    ),
    "consider_constant in the gradient": considered_constant,
    # Sums
    "a sum over the rows": lambda: linear(lambda e, *_: tt.sqr(e).sum()),
    "a sum over the rows, with loss_op='sum' or op 'sum'": lambda: with_output(
        linear(lambda e, *_: tt.sqr(e).sum(), options={"loss_op": "sum"}),
        lambda made: (made.loss, "sum"),
    ),
    "a sum and a penalty, with loss_op='sum'": lambda: linear(
        lambda e, x, y, w: tt.sqr(e).sum() + tt.sqr(w).sum(), options={"loss_op": "sum"}
    ),
    "a sum divided by the script's batch size": lambda: linear(lambda e, *_: tt.sqr(e).sum() / N),
    "a sum times 1 / the script's batch size": lambda: linear(lambda e, *_: tt.sqr(e).sum() * (1.0 / N)),
    "a sum // the script's batch size, beside a mean": lambda: linear(
        lambda e, x, y, w: tt.sqr(e).mean() + (tt.sqr(x) * w).sum() // N
    ),
    # Functions of several rows
    "a masked mean, sum(e * m) / sum(m)": lambda: masked(lambda e, m: (e * m).sum() / m.sum()),
    "a masked mean with an epsilon, sum(e * m) / (sum(m) + 1e-6)": lambda: masked(
        lambda e, m: (e * m).sum() / (m.sum() + 1e-6)
    ),
    "a weighted mean, sum(e * weights) / sum(weights)": lambda: linear(
        lambda e, x, y, w: (tt.sqr(e) * tt.sqr(y)).sum() / tt.sqr(y).sum()
    ),
    "ignored labels, sum(losses * known) / sum(known)": ignored,
    "class weights, sum(losses * weights[y]) / sum(weights[y])": class_weighted,
    "a mean of positives, sum(losses * positive) / maximum(sum(positive), 1)": lambda: linear(
        lambda e, x, y, w: (tt.sqr(e) * (y > 0)).sum() / tt.maximum((y > 0).sum(), 1)
    ),
    "losses divided by the number of rows of their class in the minibatch": lambda: classified(
        lambda p, x, y, w: (
            tt.nnet.categorical_crossentropy(p, y) / tt.extra_ops.to_one_hot(y, K).sum(axis=0)[y]
        ).sum()
    ),
    "columns less their means in the minibatch, and divided by their deviations": lambda: linear(
        lambda e, x, y, w: tt.sqr(tt.dot((x - x.mean(axis=0)) / (x.std(axis=0) + 1e-3), w) - y).mean()
    ),
    "inputs less their mean in the minibatch": lambda: linear(
        lambda e, x, y, w: tt.tanh(tt.dot(x - x.mean(), w) - y).mean()
    ),
    "inputs divided by their standard deviation in the minibatch": lambda: linear(
        lambda e, x, y, w: tt.sqr(tt.dot((x - x.mean()) / tt.sqrt(x.var() + 1e-3), w) - y).mean()
    ),
    "the root of a mean (RMSE)": lambda: linear(lambda e, *_: tt.sqrt(tt.sqr(e).mean())),
    "the logarithm of a mean": lambda: linear(lambda e, *_: tt.log(1 + tt.sqr(e).mean())),
    "feature matching: a difference of means, squared": lambda: linear(
        lambda e, x, y, w: tt.sqr((x * w).mean(axis=0) - y.mean()).sum()
    ),
    "a variance with Bessel's factor": lambda: linear(
        lambda e, x, *_: tt.sqr(e - e.mean()).sum() / (x.shape[0] - 1)
    ),
    "rows minus their mean": lambda: linear(
        lambda e, *_: tt.tanh(e - e.mean()).sum() / e.shape[0] + tt.sqr(e - e.mean()).mean()
    ),
    "batch normalization by hand": lambda: linear(
        lambda e, *_: tt.tanh((e - e.mean()) / tt.sqrt(e.var() + 1e-3) + 1).mean()
    ),
    "batch_normalization_train": lambda: linear(
        lambda e, x, y, w: tt.tanh(
            tt.nnet.bn.batch_normalization_train(x * w, tt.ones_like(w), tt.zeros_like(w))[0]
            + y.dimshuffle(0, "x")
        ).mean()
    ),
    "batch normalization over all ranks (extensions.batch_norm)": normalized_over_all_ranks,
    "the largest of the rows": lambda: linear(lambda e, *_: tt.sqr(e).max()),
    "differences of all pairs of rows": lambda: linear(
        lambda e, *_: tt.sqr(e.dimshuffle(0, "x") - e.dimshuffle("x", 0)).mean()
    ),
    "a cumulative sum along the rows": lambda: linear(lambda e, *_: tt.sqr(tt.cumsum(e)).mean()),
    "differences of successive rows": lambda: linear(lambda e, *_: tt.sqr(e[1:] - e[:-1]).mean()),
    "sorted rows": lambda: linear(lambda e, *_: (tt.sort(e) * tt.arange(e.shape[0])).mean()),
    "a softmax over the rows": lambda: linear(
        lambda e, *_: tt.sqr(tt.nnet.softmax(e.dimshuffle("x", 0))).sum()
    ),
    # Gradients
    "grad_clip in the graph": lambda: linear(
        lambda e, *_: tt.sqr(theano.gradient.grad_clip(e, -0.1, 0.1)).mean()
    ),
    "the norm of the gradient, bounded after it": lambda: stepped(
        lambda loss, w, x: [(w, w - 0.1 * tt.grad(loss, w) / tt.maximum(1, tt.grad(loss, w).norm(2)))]
    ),
    "Lasagne's adam": lambda: stepped(lambda loss, w, x: lasagne.updates.adam(loss, [w]).items()),
    "Lasagne's total_norm_constraint and momentum": lambda: stepped(
        lambda loss, w, x: lasagne.updates.momentum(
            lasagne.updates.total_norm_constraint(tt.grad(loss, [w]), 0.1), [w], 0.1
        ).items()
    ),
    "rows of an embedding, with sparse_grad": sparse_embedding,
    "rows of an embedding": embedding,
    "gradients that one function stores for another (f_grad_shared)": stored_gradients,
    "a running average of the rows, beside the gradient": lambda: stepped(
        lambda loss, w, x, mean: [
            (w, w - 0.1 * tt.grad(loss, w)),
            (mean, 0.9 * mean + 0.1 * x.mean(axis=0)),
        ],
        theano.shared(np.zeros(D), "running"),
    ),
    "a count of the steps, and a rate that follows from it": lambda: stepped(
        lambda loss, w, x, count: [(w, w - 0.1 / (1 + count) * tt.grad(loss, w)), (count, count + 1)],
        theano.shared(0.0, "count"),
    ),
    "a learning rate among the inputs": rate_among_the_inputs,
    # Networks
    "a convolution of any number of images": lambda: convolved(
        lambda maps: tt.sqr(maps).mean(), (None, 1, 6, 6)
    ),
    "a convolution with the batch size in input_shape": lambda: convolved(
        lambda maps: tt.sqr(maps).mean(), (N, 1, 6, 6)
    ),
    "the same, and global pooling": lambda: convolved(
        lambda maps: tt.sqr(maps.mean(axis=(2, 3))).sum(axis=1).mean(), (N, 1, 6, 6)
    ),
    "reshape((batch size, -1))": lambda: convolved(
        lambda maps: tt.sqr(maps.reshape((N, -1))).sum(axis=1).mean(), None
    ),
    "reshape((-1, columns))": lambda: convolved(
        lambda maps: tt.sqr(maps.reshape((-1, 32))).sum(axis=1).mean(), None
    ),
    "flatten(2)": lambda: convolved(lambda maps: tt.sqr(maps.flatten(2)).sum(axis=1).mean(), None),
    "Lasagne's InputLayer with a batch size": lasagnes_input_layer,
    "a recurrence over the time of batch-major sequences": lambda: recurrent(
        lambda x: x.dimshuffle(1, 0, 2), lambda x: x, lambda x: tt.zeros((x.shape[0], D), "float64")
    ),
    "a recurrence over time-major sequences, given with synk.In(x, axis=1)": lambda: recurrent(
        lambda x: x,
        lambda x: synk.In(x, axis=1),
        lambda x: tt.zeros((x.shape[1], D), "float64"),
        data=np.ascontiguousarray(SEQUENCES.transpose(1, 0, 2)),
    ),
    "a recurrence over time-major sequences, given without an axis": lambda: recurrent(
        lambda x: x,
        lambda x: x,
        lambda x: tt.zeros((x.shape[1], D), "float64"),
        data=np.ascontiguousarray(SEQUENCES.transpose(1, 0, 2)),
    ),
    "a recurrence whose first state has the batch size": lambda: recurrent(
        lambda x: x.dimshuffle(1, 0, 2),
        lambda x: x,
        lambda x: tt.alloc(np.float64(0), N, D),
        lambda h: tt.sqr(h[-1]).sum(axis=1).mean(),
    ),
    "a scan that maps over the rows": lambda: linear(
        lambda e, *_: theano.scan(lambda one: tt.sqr(one), e)[0].mean()
    ),
    # Data
    "data[i * b : (i + 1) * b]": lambda: selected(window, window),
    "data[perm[i * b : (i + 1) * b]]": lambda: selected(
        lambda one, i: one[window(theano.shared(np.random.RandomState(1).permutation(N), "perm"), i)]
    ),
    "data[arange(i * b, (i + 1) * b)]": lambda: selected(
        lambda one, i: one[tt.arange(i * 4, (i + 1) * 4)]
    ),
    "data[rows], with the numbers of the rows as the input": lambda: selected(
        lambda one, i: one[i], data=[[3, 1, 7, 9, 2]], index=tt.lvector("rows")
    ),
    "a window of shared data, then reshape((-1, columns))": lambda: selected(
        lambda one, i: window(one, i).reshape((-1, D))
    ),
    "a window of shared data beside rows that are given": window_beside_rows,
    "a minibatch that set_value puts into a shared variable, in a function without inputs": lambda: (
        held_rows(lambda held: {})
    ),
    "a minibatch that set_value puts into a sliceable shared variable": lambda: held_rows(
        lambda held: {"sliceable_shareds": [held]}
    ),
    "a learning rate that set_value changes": changed_rate,
    # Outputs
    "predictions of the rows, without an op": lambda: predicted(
        lambda p, y: tt.cast(tt.eq(p, y), "float64")
    ),
    "predictions of the rows, gathered": lambda: predicted(lambda p, y: (tt.eq(p, y), "gather")),
    "the share of errors, mean(neq(...))": lambda: predicted(lambda p, y: tt.mean(tt.neq(p, y))),
    "the number of errors, sum(neq(...)), without an op": lambda: predicted(
        lambda p, y: tt.sum(tt.cast(tt.neq(p, y), "float64"))
    ),
    "noise in the loss, from a random stream": lambda: linear(
        lambda e, x, *_: tt.sqr(e * MRG_RandomStreams(3).uniform(e.shape)).mean(), is_random=True
    ),
}


def serial(made):
    """The script's own function."""
    updates = made.updates or descent(made)
    inputs = [getattr(one, "variable", one) for one in made.inputs]
    givens = list(made.givens.items())
    return theano.function(inputs, made.loss, updates=updates, givens=givens, mode=made.mode)


def by_parallel_function(made):
    updates, options = made.updates or descent(made), {**made.options, "mode": made.mode}
    return train.parallel_function(
        made.inputs, made.loss, updates=updates, givens=made.givens, **options
    )


def by_make_train_function(made):
    options = dict(made.options)
    for name in ("gradients", "params"):
        options.pop(name, None)
    if "sliceable_shareds" in options or not made.inputs:
        raise LookupError("it takes no functions without inputs")
    whole = [one for one in made.inputs if is_given_whole(one)]
    rows = [one for one in made.inputs if one not in whole]
    updates = made.updates or descent(made)
    params = [target for target, _ in updates]
    return train.make_train_function(
        made.loss, params, rows, None, updates, givens=made.givens, bcast_inputs=whole,
        function_options={"mode": made.mode}, **options,
    )  # fmt: skip


def is_given_whole(given):
    """Whether an input is a number that is no index of rows."""
    return getattr(given, "ndim", 1) == 0 and given.dtype.startswith("float")


def by_function(made):
    output = made.loss if made.output is None else made.output
    sliceable = made.options.get("sliceable_shareds")
    return synk.function(
        made.inputs, output, givens=made.givens, sliceable_shareds=sliceable, mode=made.mode
    )


def plain(made):
    """The plain function of the output that `by_function` has."""
    output = made.loss if made.output is None else made.output
    output = output[0] if isinstance(output, tuple) else output
    inputs = [getattr(one, "variable", one) for one in made.inputs]
    return theano.function(inputs, output, givens=list(made.givens.items()), mode=made.mode)


def descent(made):
    gradients = theano.grad(made.loss, made.params)
    return [(one, one - 0.1 * gradient) for one, gradient in zip(made.params, gradients)]


#: The ways in which a script is ported, and the serial function of each
WAYS = {
    "function": (by_function, plain),
    "parallel_function": (by_parallel_function, serial),
    "make_train_function": (by_make_train_function, serial),
}

EQUAL, WARNED, REFUSED, RANDOM, NONE = "equal", "warned", "refused", "not compared", "--"


def outcome(make, way):
    """Return what comes of an idiom, in the present world: one of these words.

    Raises
    ------
    AssertionError
        If a result differs from the serial one in silence, or a right one is warned of, or an error says
        not what to do.
    """
    build, build_serial = WAYS[way]
    theirs = called(build_serial, make())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", synk.SynkhronosWarning)
        made = make()
        try:
            ours = called(build, made)
        except LookupError as error:
            if type(error) is not LookupError:
                raise
            return NONE
        except (TypeError, ValueError, synk.SynkhronosError) as error:
            assert explains(error), f"{type(error).__name__}: {error}"
            return REFUSED
    texts = [str(one.message) for one in caught if one.category is synk.SynkhronosWarning]
    is_equal = all(same(one, other) for one, other in zip(ours, theirs))
    if made.is_random:
        assert not texts
        return EQUAL if is_equal else RANDOM
    assert is_equal or texts, f"different in silence: {ours} instead of {theirs}"
    assert not (is_equal and texts), f"a false alarm: {texts}"
    return EQUAL if is_equal else WARNED


def called(build, made):
    """Return the results of some calls, and then the values of the parameters on all ranks."""
    function, results = build(made), []
    data = list(made.data)
    if build is by_make_train_function:
        whole = [is_given_whole(one) for one in made.inputs]
        rows = [value for value, is_whole in zip(data, whole) if not is_whole]
        data = [rows, *(value for value, is_whole in zip(data, whole) if is_whole)]
    for _ in range(STEPS):
        if made.before is not None:
            made.before()
        results.append(np.array(function(*data)))
    if build in (by_function, plain):
        return results
    if build is serial:
        values = [[one.get_value()] * synk.size() for one in made.params]
    else:
        values = synk.gather(made.params)
    return [*results, *(np.array(one) for one in values)]


def explains(error):
    """Whether an error is one of this package, which says what to do."""
    text = str(error)
    return any(word in text for word in ("synk.", "loss_op", "give ", "graph fixes", "In(x, axis"))


def same(one, other):
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-8, atol=1e-10)
