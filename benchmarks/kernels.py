"""kernels: operations on the CPU by shape, against Theano's own and against what limits them.

One process with one thread. The shapes are those of Lasagne's MNIST CNN with 250 rows and of ResNet-50
with 4 images of 224 x 224 pixels. The limit of an operation is the time to copy as many bytes as it has
to read and write, or of a product of matrices with as many multiplications.
"""

import time
from typing import NamedTuple

import common
from common import COLOURS, ONE_THREAD, Contestant

import numpy as np

CHANNELS = (0, 2, 3)
TIMES = 12  # calls in a turn, of which the median counts


class Case(NamedTuple):
    """An operation on arrays of given shapes."""

    name: str
    shapes: list
    build: object  # of variables: a variable, or a list
    arrays: float = 0  # of the first shape, that have to be read or written
    products: int = 0  # multiplications and additions


def convolution(name, images, filters, pad=0, stride=1):
    """Return the three cases of a convolution: forward, and both gradients."""
    extent = (images[2] + 2 * pad - filters[2]) // stride + 1
    top = (images[0], filters[0], extent, extent)
    products = int(np.prod(top) * np.prod(filters[1:]))

    def forward(x, w, _):
        import theano.tensor as tt

        options = {"input_shape": images, "filter_shape": filters, "filter_flip": False}
        return tt.nnet.conv2d(x, w, border_mode=pad, subsample=(stride, stride), **options)

    def gradient(number):
        def build(x, w, top):
            import theano

            return theano.grad(None, [x, w][number], known_grads={forward(x, w, top): top})

        return build

    parts = {"": forward, ", gradient of filters": gradient(1), ", gradient of input": gradient(0)}
    shapes = [images, filters, top]
    return [Case(name + part, shapes, build, 0, products) for part, build in parts.items()]


def pooling(name, images, window, stride, pad):
    def forward(x):
        from theano.tensor.signal.pool import pool_2d

        return pool_2d(x, (window,) * 2, True, (stride,) * 2, (pad,) * 2)

    def backward(x):
        import theano

        return theano.grad(forward(x).sum(), x)

    return [
        Case(f"maxima of {name}", [images], forward, 1 + 1 / stride**2),
        Case(f"maxima of {name}, gradient", [images], backward, 2 + 2 / stride**2),
    ]


def normalized(x, gradient, scale, shift):
    """Return a rectified batch normalization, from its formula, and its gradients."""
    import theano
    import theano.tensor as tt

    mean, variance = (one(x, CHANNELS, keepdims=True) for one in (tt.mean, tt.var))
    scale_along, shift_along = (one.dimshuffle("x", 0, "x", "x") for one in (scale, shift))
    y = (x - mean) * (scale_along * tt.inv(tt.sqrt(variance + np.float32(1e-4)))) + shift_along
    out = tt.nnet.relu(y)
    return [out, *theano.grad(None, [x, scale, shift], known_grads={out: gradient})]


def theanos_normalized(x, gradient, scale, shift):
    """Return the same of Theano's operation."""
    import theano
    import theano.tensor as tt

    y, mean, invstd = tt.nnet.bn.batch_normalization_train(x, scale, shift, "spatial")
    out = tt.nnet.relu(y)
    return [out, *theano.grad(None, [x, scale, shift], known_grads={out: gradient})]


def statistics(x):
    return [x.mean(CHANNELS), x.var(CHANNELS)]


def rectified_gradient(x, gradient):
    import theano
    import theano.tensor as tt

    return theano.grad(None, x, known_grads={tt.nnet.relu(x): gradient})


def cases():
    mnist, resnet = (250, 32, 24, 24), (4, 256, 56, 56)
    normalization = [resnet, resnet, (256,), (256,)]
    return [
        *pooling("2 x 2, 250 x 32 x 24 x 24", mnist, 2, 2, 0),
        *pooling("3 x 3 by 2, 4 x 64 x 112 x 112", (4, 64, 112, 112), 3, 2, 1),
        Case("sums by channel, 250 x 32 x 24 x 24", [mnist], lambda x: x.sum(CHANNELS), 1),
        Case("sums by channel, 4 x 256 x 56 x 56", [resnet], lambda x: x.sum(CHANNELS), 1),
        Case("sums of rows, 4096 x 1024", [(4096, 1024)], lambda x: x.sum(1), 1),
        Case("sums of columns, 4096 x 1024", [(4096, 1024)], lambda x: x.sum(0), 1),
        Case("mean and variance, 4 x 256 x 56 x 56", [resnet], statistics, 1),
        Case("gradient of a rectifier, 4 x 256 x 56 x 56", [resnet, resnet], rectified_gradient, 3),
        Case("batch normalization, formula, and gradient", normalization, normalized, 8),
        Case("batch normalization, Theano's, and gradient", normalization, theanos_normalized, 8),
        *convolution("5 x 5, 250 x 1 x 28 x 28 to 32", (250, 1, 28, 28), (32, 1, 5, 5))[:2],
        *convolution("5 x 5, 250 x 32 x 12 x 12 to 32", (250, 32, 12, 12), (32, 32, 5, 5)),
        *convolution("3 x 3, 4 x 64 x 56 x 56 to 64", (4, 64, 56, 56), (64, 64, 3, 3), 1),
        *convolution("3 x 3, 4 x 512 x 7 x 7 to 512", (4, 512, 7, 7), (512, 512, 3, 3), 1),
        *convolution("1 x 1, 4 x 256 x 56 x 56 to 64", (4, 256, 56, 56), (64, 256, 1, 1)),
        *convolution("1 x 1 by 2, 4 x 256 x 56 x 56 to 512", (4, 256, 56, 56), (512, 256, 1, 1), 0, 2),
        *convolution("7 x 7 by 2, 4 x 3 x 224 x 224 to 64", (4, 3, 224, 224), (64, 3, 7, 7), 3, 2)[:2],
    ]


def arrays_of(case):
    random = np.random.RandomState(0)
    return [random.standard_normal(shape).astype("float32") for shape in case.shapes]


# Contestants


def compiled(kernels):
    """The operations of Theano or of the library."""
    import synkhronos as synk
    import theano
    import theano.tensor as tt

    synk.fork(1, use_gpu=False, kernels=kernels)
    calls = {}
    for case in cases():
        inputs = [tt.TensorType("float32", (False,) * len(shape))() for shape in case.shapes]
        function = theano.function(inputs, case.build(*inputs), on_unused_input="ignore")
        function.trust_input = True
        calls[case.name] = function, arrays_of(case)
    yield lambda: {name: _seconds(function, *arrays) for name, (function, arrays) in calls.items()}
    synk.close()


def limits():
    """A copy of as many bytes, or a product of matrices with as many multiplications."""
    import synkhronos  # noqa: F401  (so that malloc is as for the others)

    matrices = np.ones((2, 1024, 1024), "float32")
    product = np.empty((1024, 1024), "float32")

    def turn():
        times = {}
        multiply = _seconds(np.dot, *matrices, product)
        for case in cases():
            if case.products:
                times[case.name] = multiply * case.products / 1024**3
            else:
                array = np.ones(case.shapes[0], "float32")
                times[case.name] = _seconds(np.copyto, np.empty_like(array), array) * case.arrays / 2
        return times

    yield turn


def _seconds(call, *arguments):
    found = []
    for _ in range(TIMES):
        start = time.perf_counter()
        call(*arguments)
        found.append(time.perf_counter() - start)
    return float(np.median(found))


# The row


def measure(options):
    with common.contestants(
        theano=Contestant(compiled, "theano", environment=ONE_THREAD),
        fast=Contestant(compiled, "fast", environment=ONE_THREAD),
        limit=Contestant(limits, environment=ONE_THREAD),
    ) as players:
        times = common.take_turns(players, 3 if options.quick else 9, "operations")
    lines = []
    for case in cases():
        theano, fast, limit = (
            [one[case.name] for one in times[player]] for player in ("theano", "fast", "limit")
        )
        lines += [
            common.line(f"{case.name}: Theano", "ms", theano),
            common.line(f"{case.name}: Synkhronos", "ms", fast, theano, "Theano"),
            common.line(f"{case.name}: limit", "ms", limit, fast, "Synkhronos"),
        ]
    notes = [
        "one process with one thread; the limit is a copy of the bytes that have to be read and "
        "written, or a product of two matrices of 1024 x 1024, scaled to as many multiplications",
    ]
    return common.Result("operations on the CPU, float32", lines, notes)


def draw(figure, record):
    axes = figure.subplots()
    names = [case.name for case in cases()]
    places = np.arange(len(names))[::-1]
    colours = {"Theano": "other light", "Synkhronos": "synk", "limit": "goal"}
    for number, (what, colour) in enumerate(colours.items()):
        medians = [common.find(record, f"{name}: {what}")["median"] for name in names]
        axes.barh(places + 0.27 * (1 - number), medians, 0.27, color=COLOURS[colour], label=what)
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xscale("log")
    ticks = [0.2, 0.5, 1, 2, 5, 10, 20, 50]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("milliseconds, one thread")
    axes.legend(frameon=False, loc="lower right")
    axes.set_title("Operations on the CPU, float32")
    figure.set_size_inches(9, 10)


if __name__ == "__main__":
    common.main(__doc__, measure, draw)
