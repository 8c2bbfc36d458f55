"""Training steps whose gradients are changed on their way, as by ``grad_clip``, against serial steps."""

import numpy as np
import pytest
from steps import Network, assert_same_results, assert_same_values, batches, digits

import synkhronos as synk
from compilers import NAME, Apply, Op, compiler, cross_entropy, scan, softmax, tt
from synkhronos.engines.names import ViewOp, graph_inputs
from synkhronos.extensions import train, updates

pytestmark = pytest.mark.usefixtures("in_python", "in_threads")
gradient = compiler.gradient
LIMIT = 0.003


@pytest.fixture(params=[2, 3])
def ranks(request, world_of):
    world_of(request.param)


class OwnGradient(ViewOp):
    """A view whose gradient is computed by a function."""

    __props__ = ("of",)

    def __init__(self, of):
        self.of = of

    def grad(self, inputs, gradients):
        return [self.of(*gradients)]

    def pullback(self, inputs, outputs, gradients):
        return self.grad(inputs, gradients)


class Limited(Op):
    """An operation of the user's, of which the library knows nothing."""

    __props__ = ()

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = np.clip(inputs[0], -LIMIT, LIMIT)


def of_limited_norm(slope):
    """Each row is scaled to a limited norm."""
    norm = tt.sqrt(tt.sqr(slope).sum(axis=1, keepdims=True))
    return slope * tt.minimum(1, LIMIT / (1e-9 + norm))


def on(view):
    """Return a function that inserts an operation after the first product of a network."""

    def build(net):
        w1, b1, w2, b2 = net.params
        net.hidden = tt.tanh(view(tt.dot(net.x, w1) + b1))
        net.losses = cross_entropy(softmax(tt.dot(net.hidden, w2) + b2), net.y)
        return net.losses.mean()

    return build


def limited(variable, limit=LIMIT):
    return gradient.grad_clip(variable, -limit, limit)


def twice(net):
    loss = on(limited)(net)
    return loss + tt.sqr(limited(net.hidden, LIMIT / 2) - 1).mean() + net.penalty


def loop(net):
    """A recurrent network over the columns of the rows, as Lasagne's recurrent layers clip it."""
    w1, b1, w2, b2 = net.params
    recurrent = net.shared(np.eye(4) / 2, "recurrent")
    net.params.append(recurrent)

    def step(column, state, w, b, weights):
        inner = column.dimshuffle(0, "x") * w[0] + b + tt.dot(state, weights)
        return tt.tanh(limited(inner))

    states = scan(
        step, sequences=[net.x.T], outputs_info=[tt.zeros_like(tt.dot(net.x, w1))],
        non_sequences=[w1, b1, recurrent],
    )  # fmt: skip
    return cross_entropy(softmax(tt.dot(states[-1], w2) + b2), net.y).mean()


def loop_after_clipping(net):
    """The loop itself is linear; what follows it backwards is clipped."""
    w1, _, w2, b2 = net.params
    states = scan(
        lambda column, state, b: state + tt.tanh(column.dimshuffle(0, "x") * b),
        sequences=[net.x.T], outputs_info=[limited(tt.dot(net.x, w1))],
        non_sequences=[net.params[1]],
    )  # fmt: skip
    return cross_entropy(softmax(tt.dot(states[-1], w2) + b2), net.y).mean()


def normalized(net):
    """With the statistics of all ranks, in whose gradients the ranks meet."""
    w1, b1, w2, b2 = net.params
    inner = tt.dot(limited(tt.dot(net.x, w1)), tt.eye(4, dtype=w1.dtype))
    mean = synk.ops.all_reduce(inner.mean(axis=0), "avg")
    variance = synk.ops.all_reduce(tt.sqr(inner - mean).mean(axis=0), "avg")
    hidden = limited(tt.tanh((inner - mean) / tt.sqrt(variance + 0.1) + b1))
    return cross_entropy(softmax(tt.dot(hidden, w2) + b2), net.y).mean()


def shifted(net):
    """A constant is added to the gradient of each row."""
    w1, b1, w2, _ = net.params
    del net.params[3:]
    view = OwnGradient(lambda slope: slope + 0.001)
    output = tt.dot(tt.tanh(view(tt.dot(net.x, w1) + b1)), w2)
    return tt.sqr(output - net.y.dimshuffle(0, "x")).mean()


def constant_part(net):
    return on(lambda one: one + gradient.disconnected_grad(one) ** 2)(net)


def considered_constant(net):
    constant = getattr(gradient, "consider_constant", gradient.disconnected_grad)  # of Theano only
    return on(lambda one: one * tt.tanh(constant(one)))(net)


#: Losses that are means over the rows. Their gradients pass operations of each kind.
LOSSES = {
    "clipped": on(limited),
    "clipped twice, and a penalty": twice,
    "clipped in a loop": loop,
    "clipped before a loop": loop_after_clipping,
    "limited in norm": on(OwnGradient(of_limited_norm)),
    "by an unknown operation": on(OwnGradient(Limited())),
    "rectified": on(OwnGradient(lambda slope: tt.maximum(slope, 0))),
    "signs": on(OwnGradient(lambda slope: 0.01 * tt.sgn(slope) / slope.shape[1])),
    "with a constant": shifted,
    "chosen": on(OwnGradient(lambda slope: tt.switch(abs(slope) < LIMIT, slope, 0.5 * slope))),
    "scaled": on(lambda one: gradient.grad_scale(one, -0.5)),
    "zero": lambda net: on(gradient.zero_grad)(net) + tt.sqr(tt.dot(net.x, net.params[0])).mean(),
    "disconnected": constant_part,
    "considered constant": considered_constant,
}  # fmt: skip


def descent(gradients, params):
    return [(param, param - 0.5 * one) for param, one in zip(params, gradients)]


def of_function(net, loss, make):
    return make([net.x, net.y], loss, updates=descent(tt.grad(loss, net.params), net.params))


def of_gradients(net, loss, make):
    given = {}
    gradients = tt.grad(loss, net.params)
    if make is train.parallel_function:
        given = {"gradients": gradients, "params": net.params}
    return make([net.x, net.y], loss, updates=descent(gradients, net.params), **given)


def of_marks(net, loss, make):
    new = descent(train.gradients(loss, net.params), net.params)
    return make([net.x, net.y], loss, updates=new)


def of_training(rule):
    def build(net, loss, make):
        if make is train.parallel_function:
            return train.make_train_function(loss, net.params, net.x, net.y, rule, learning_rate=0.5)
        step = train.make_train_function_theano(loss, net.params, net.x, net.y, rule, learning_rate=0.5)
        return lambda *args, num_slices=1: step(*args)

    return build


def by_gradients(gradients, params, learning_rate):
    return [(param, param - learning_rate * one) for param, one in zip(params, gradients)]


BUILDERS = {
    "function": of_function, "gradients": of_gradients, "marks": of_marks,
    "training": of_training(by_gradients), "flat training": of_training(updates.sgd),
    "training by parameters": of_training(updates.sgd_nonflat),
}  # fmt: skip


def compare(loss_of, build, steps=9, slices=3):
    """Compare steps on all ranks with serial ones, also in slices, and with fewer rows than ranks."""
    nets = [Network(), Network()]
    makes = train.parallel_function, compiler.function
    ours, theirs = [build(net, loss_of(net), make) for net, make in zip(nets, makes)]
    x, y = digits()
    for step, rows in enumerate(batches(steps)):
        result = ours(x[rows], y[rows], num_slices=1 + step % slices)
        assert_same_results(result, theirs(x[rows], y[rows]))
        assert_same_values(nets[0].params, nets[1].params)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:.*consider_constant:UserWarning")
def test_steps_equal_the_serial_ones(ranks, name):
    compare(LOSSES[name], of_function)


@pytest.mark.parametrize("builder", BUILDERS)
def test_all_ways_to_build_a_step_equal_the_serial_step(two, builder):
    compare(twice, BUILDERS[builder])


def test_collectives_in_the_graph(ranks):
    """The gradient passes the ranks' collectives as well; slices would have their own statistics."""
    compare(normalized, of_function, slices=1)


def test_rows_of_sliceable_variables(two):
    nets = [Network(), Network()]
    x, y = digits()
    shareds = [compiler.shared(x, "x_rows"), compiler.shared(y, "y_rows")]
    loss = twice(nets[0])
    step = train.parallel_function(
        [], loss, updates=descent(tt.grad(loss, nets[0].params), nets[0].params),
        sliceable_shareds=shareds, givens=dict(zip([nets[0].x, nets[0].y], shareds)),
    )  # fmt: skip
    synk.scatter(shareds, [x, y])
    serial = of_function(nets[1], twice(nets[1]), compiler.function)
    assert_same_results(step(), serial(x, y))
    half = (len(x) + 1) // 2
    rows = np.r_[0:7, half : half + 4]
    assert_same_results(step(batch_s=[slice(7), slice(4)]), serial(x[rows], y[rows]))
    assert_same_values(nets[0].params, nets[1].params)


def test_a_sum_needs_no_share_of_the_rows(two):
    """The gradient of each row is the serial one already."""

    def sum_of(net):
        on(limited)(net)
        return net.losses.sum() / 40 + net.penalty

    def build(net, loss, make):
        options = {"loss_op": "sum"} if make is train.parallel_function else {}
        new = descent(tt.grad(loss, net.params), net.params)
        return make([net.x, net.y], loss, updates=new, **options)

    compare(sum_of, build, slices=1)


def unclipped_loop(net):
    w1, b1, w2, b2 = net.params
    states = scan(
        lambda column, state, w, b: tt.tanh(column.dimshuffle(0, "x") * w[0] + b * state),
        sequences=[net.x.T], outputs_info=[tt.tanh(tt.dot(net.x, w1))], non_sequences=[w1, b1],
    )  # fmt: skip
    return cross_entropy(softmax(tt.dot(states[-1], w2) + b2), net.y).mean()


#: Gradients that the compiler builds by many operations, all of them homogeneous.
UNCHANGED = {
    "layers": lambda net: net.loss + net.penalty + abs(net.params[0]).sum(),
    "products": lambda net: tt.dot(net.hidden, net.params[2]).prod(axis=1).mean() + net.loss,
    "limits": lambda net: tt.maximum(0, 1 - tt.clip(net.hidden, -1, 1)).mean() + net.loss,
    "largest": lambda net: tt.max(net.hidden, axis=1).mean() + net.loss,
    "norms": lambda net: tt.sqrt(tt.sqr(net.hidden).sum(axis=1) + 1e-6).mean() + net.loss,
    "parts": lambda net: tt.concatenate([net.hidden[:, 1:], net.hidden**2], axis=1).std() + net.loss,
    "order": lambda net: tt.sort(net.hidden, axis=1)[:, 0].mean() + net.loss,
    "gradients": lambda net: tt.sqr(tt.grad(tt.sqr(net.hidden).sum(), net.x)).mean() + net.loss,
    "loop": unclipped_loop,
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_the_compiler_differentiates_needs_no_count(two, name):
    net = Network()
    step = of_function(net, UNCHANGED[name](net), train.parallel_function)
    assert [one.name for one in step.functions] == ["gradient", "update"]
    step = of_function(net, twice(net), train.parallel_function)
    assert [one.name for one in step.functions] == ["count", "gradient", "update"]


def clipped_parameter(net):
    net.params[0].name = "w1"
    hidden = tt.tanh(tt.dot(net.x, limited(net.params[0])))
    return tt.sqr(hidden).mean()


def clipped_parameter_in_a_loop(net):
    states = scan(
        lambda state, weights: tt.dot(state, limited(weights)) / 4,
        outputs_info=[tt.dot(net.x, net.params[0])], non_sequences=[net.params[2][:, :1] * tt.ones(4)],
        n_steps=2,
    )  # fmt: skip
    return tt.sqr(states[-1]).mean()


@pytest.mark.parametrize("loss_op", ["avg", "sum"])
@pytest.mark.parametrize("loss_of", [clipped_parameter, clipped_parameter_in_a_loop])
def test_a_gradient_that_is_clipped_after_its_sum_over_the_rows_is_refused(two, loss_of, loss_op):
    net = Network()
    loss = loss_of(net) * (1 if loss_op == "avg" else net.x.shape[0])
    net.params = [one for one in net.params if one in set(graph_inputs([loss]))]
    new = descent(tt.grad(loss, net.params), net.params)
    with pytest.raises(ValueError, match="sum over the rows of one rank.*T.clip.T.grad"):
        train.parallel_function([net.x], loss, updates=new, loss_op=loss_op)


def test_given_gradients_that_are_clipped_already_are_refused(two):
    net = Network()
    clipped = [tt.clip(one, -0.01, 0.01) for one in tt.grad(net.loss, net.params)]
    new = descent(clipped, net.params)
    with pytest.raises(ValueError, match="sum over the rows of one rank"):
        train.parallel_function(
            [net.x, net.y], net.loss, updates=new, gradients=clipped, params=net.params
        )
    step = train.parallel_function([net.x, net.y], net.loss, updates=new)
    serial = Network()
    clipped = [tt.clip(one, -0.01, 0.01) for one in tt.grad(serial.loss, serial.params)]
    other = compiler.function([serial.x, serial.y], serial.loss, updates=descent(clipped, serial.params))
    assert_same_results(step(*digits()), other(*digits()))
    assert_same_values(net.params, serial.params)


class Doubled(Op):
    """An operation of the user's with a gradient that is another one, of which nothing is known."""

    __props__ = ()

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = 2 * inputs[0]

    def grad(self, inputs, gradients):
        return [Doubled()(gradients[0])]

    def pullback(self, inputs, outputs, gradients):
        return self.grad(inputs, gradients)


def test_an_unknown_operation_on_a_parameter_is_accepted(two):
    """It may well be linear; the gradient that it gets is a sum over the rows."""

    def loss_of(net):
        return tt.sqr(tt.tanh(tt.dot(net.x, Doubled()(net.params[0]))) - net.y[:, None]).mean()

    def build(net, loss, make):
        net.params = net.params[:1]
        return of_function(net, loss, make)

    compare(loss_of, build)


def test_given_gradients_with_a_penalty_of_the_script(two):
    """What is added to a gradient after its sum over the rows counts once."""

    def build(net, loss, make):
        slopes = [one + 0.1 * param for one, param in zip(tt.grad(loss, net.params), net.params)]
        given = {"gradients": slopes, "params": net.params} if make is not compiler.function else {}
        return make([net.x, net.y], loss, updates=descent(slopes, net.params), **given)

    compare(on(limited), build)
    compare(lambda net: net.loss, build)


@pytest.mark.skipif(NAME == "pytensor", reason="Lasagne is for Theano")
@pytest.mark.filterwarnings("ignore::UserWarning:lasagne")
def test_the_constraints_of_lasagne(ranks):
    """They change the gradient of all rows, or the new parameters."""
    lasagne = pytest.importorskip("lasagne")

    def build(net, loss, make):
        slopes = lasagne.updates.total_norm_constraint(tt.grad(loss, net.params), 0.1)
        new = lasagne.updates.sgd(slopes, net.params, 0.5)
        for one in net.params[::2]:
            new[one] = lasagne.updates.norm_constraint(new[one], 0.9)
        return make([net.x, net.y], loss, updates=new)

    compare(on(limited), build)


@pytest.mark.skipif(NAME == "pytensor", reason="Lasagne is for Theano")
@pytest.mark.filterwarnings("ignore::UserWarning:lasagne")
@pytest.mark.parametrize("layer", ["LSTMLayer", "GRULayer", "RecurrentLayer"])
def test_the_recurrent_layers_of_lasagne(two, layer):
    lasagne = pytest.importorskip("lasagne")
    layers, steps, params = lasagne.layers, [], []
    for make in (train.parallel_function, compiler.function):
        lasagne.random.set_rng(np.random.RandomState(1))
        x, y = tt.dtensor3("x"), tt.dvector("y")
        network = layers.InputLayer((None, 4, 3), x)
        network = getattr(layers, layer)(network, 5, grad_clipping=0.002)
        network = layers.SliceLayer(network, -1, 1)
        network = layers.DenseLayer(network, 1, nonlinearity=None)
        loss = tt.sqr(layers.get_output(network)[:, 0] - y).mean()
        params.append(layers.get_all_params(network, trainable=True))
        new = lasagne.updates.momentum(loss, params[-1], 0.5)
        steps.append(make([x, y], loss, updates=new))
    rng = np.random.RandomState(2)
    for n_rows in (7, 12, 1):
        rows = rng.randn(n_rows, 4, 3), 5 * rng.randn(n_rows)
        assert_same_results(steps[0](*rows), steps[1](*rows))
    assert_same_values(*params)
