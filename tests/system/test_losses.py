"""Losses whose gradients are added up or averaged, although that is not their kind."""

import warnings

import numpy as np
import pytest
from steps import Network, assert_same_results, digits

import synkhronos as synk
from compilers import compiler, tt
from synkhronos.extensions import train, updates

pytestmark = pytest.mark.usefixtures("two", "in_python", "in_threads")
A_SUM = "the loss .* is a sum over the rows.*give loss_op='sum'"
BOTH = "the loss .* adds a sum over the rows and a mean over the rows.*divide the sum by the number of"
A_MEAN = "the loss .* is a mean over the rows.*leave out loss_op='sum'"


def noticed(build):
    """Return what a function returns, and the messages of the warnings that it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = build()
    ours = [one for one in caught if issubclass(one.category, synk.SynkhronosWarning)]
    for one in ours:
        assert one.filename == __file__
    return result, [str(one.message) for one in ours]


def assert_noticed(messages, pattern):
    """There is one warning, of this pattern; or none, if the pattern is None."""
    if pattern is None:
        assert messages == []
    else:
        [message] = messages
        with pytest.raises(RuntimeError, match=pattern):
            raise RuntimeError(message)


def descent(gradients, params):
    return [(param, param - 0.01 * gradient) for param, gradient in zip(params, gradients)]


def as_output(net, loss, **options):
    new = descent(tt.grad(loss, net.params), net.params)
    return train.parallel_function([net.x, net.y], loss, updates=new, **options)


def as_loss(net, loss, **options):
    new = descent(tt.grad(loss, net.params), net.params)
    return train.parallel_function([net.x, net.y], updates=new, loss=loss, **options)


def as_marks(net, loss, **options):
    new = descent(train.gradients(loss, net.params), net.params)
    return train.parallel_function([net.x, net.y], updates=new, **options)


def as_gradients(net, loss, **options):
    gradients = tt.grad(loss, net.params)
    new = descent(gradients, net.params)
    options = {**options, "gradients": gradients, "params": net.params}
    return train.parallel_function([net.x, net.y], [net.accuracy], updates=new, **options)


def as_training(net, loss, **options):
    return train.make_train_function(loss, net.params, net.x, net.y, descent, **options)


def as_flat_training(net, loss, **options):
    rule, inputs = updates.momentum, [net.x, net.y]
    return train.make_train_function(loss, net.params, inputs, None, rule, 0.01, **options)


#: A loss, and what is noticed with each of the values of ``loss_op``.
LOSSES = {
    "a mean": (lambda net: net.loss, None, A_MEAN),
    "a mean and a penalty": (lambda net: net.loss + net.penalty, None, A_MEAN),
    "a sum": (lambda net: net.losses.sum(), A_SUM, None),
    "a sum and a penalty": (lambda net: net.losses.sum() + net.penalty, A_SUM, None),
    "over a fixed number": (lambda net: net.losses.sum() / 8, A_SUM, None),
    "times a fixed number": (lambda net: (1.0 / 8) * net.losses.sum() + net.penalty, A_SUM, None),
    "over the number of rows": (lambda net: net.losses.sum() / net.x.shape[0], None, A_MEAN),
    "a sum and a mean": (lambda net: net.loss + tt.sqr(net.hidden).sum() / 8, BOTH, BOTH),
    "unknown": (lambda net: tt.sort(net.losses).sum(), None, None),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "build", [as_output, as_loss, as_marks, as_gradients, as_training, as_flat_training]
)
def test_a_loss_of_the_other_kind_is_noticed_once(build, name):
    make, *patterns = LOSSES[name]
    for loss_op, pattern in zip(("avg", "sum"), patterns):
        net = Network()
        if loss_op == "sum" and build is as_flat_training and "penalty" in name:
            continue  # refused
        _, messages = noticed(lambda net=net, op=loss_op: build(net, make(net), loss_op=op))
        assert_noticed(messages, pattern)


@pytest.mark.parametrize("marked", [False, True])
def test_the_output_of_a_sum_of_losses_has_the_operation_of_the_gradients(marked):
    """The loss of marked gradients is found among the outputs as well."""
    net = Network()
    loss = net.losses.sum()
    x, y = digits()
    slopes = train.gradients(loss, net.params) if marked else tt.grad(loss, net.params)
    new = descent(slopes, net.params)
    step = train.parallel_function([net.x, net.y], [net.accuracy, loss], updates=new, loss_op="sum")
    expected = compiler.function([net.x, net.y], [net.accuracy, loss])(x, y)
    assert_same_results(step(x, y), expected)


def test_the_only_scalar_output_is_the_loss_of_a_sum():
    net = Network()
    x, y = digits()
    loss = net.losses.sum() + net.penalty
    evaluate = train.parallel_function([net.x, net.y], [loss, (net.hidden, "gather")], loss_op="sum")
    assert_same_results(evaluate(x, y)[0], compiler.function([net.x, net.y], loss)(x, y))
    for outputs in ([loss, net.accuracy], None, [(net.hidden, "gather")]):
        with pytest.raises(ValueError, match="loss_op: 'sum' is the operation for a loss, .*loss="):
            train.parallel_function([net.x, net.y], outputs, loss_op="sum")


@pytest.mark.parametrize("name", ["a sum", "unknown"])
def test_a_loss_that_is_summed_as_an_output_only_is_noticed(name):
    net = Network()
    loss = LOSSES[name][0](net)
    new = descent(tt.grad(loss, net.params), net.params)
    for output in ((loss, "sum"), synk.Out(loss, "sum")):
        _, messages = noticed(
            lambda one=output: train.parallel_function([net.x, net.y], one, updates=new)
        )
        pattern = "loss_op='avg'.*give loss_op='sum'" if name == "unknown" else A_SUM
        assert_noticed(messages, pattern)
        _, messages = noticed(
            lambda one=output: train.parallel_function([net.x, net.y], one, updates=new, loss_op="sum")
        )
        assert messages == []


def test_other_outputs_that_are_sums_are_noticed_as_those_of_functions():
    net = Network()
    new = descent(tt.grad(net.loss, net.params), net.params)
    step = train.parallel_function([net.x, net.y], [net.loss, net.losses.sum()], updates=new)
    _, messages = noticed(lambda: step(*digits()))
    assert_noticed(messages, "output 1 .*\\(output, 'sum'\\)")


def test_losses_of_rows_in_other_places_are_noticed():
    """Of time-major inputs, of rows that an index selects, and of inputs that others replace."""
    x, w = tt.dmatrix("x"), compiler.shared(np.ones(3), "w")
    loss = tt.sqr(tt.dot(x.T, w)).sum()
    new = descent(tt.grad(loss, [w]), [w])
    _, messages = noticed(lambda: train.parallel_function([synk.In(x, axis=1)], loss, updates=new))
    assert_noticed(messages, A_SUM)

    loss = tt.sqr(tt.dot(x, w)).sum()
    new = descent(tt.grad(loss, [w]), [w])
    index, data = tt.lscalar("index"), compiler.shared(np.ones((9, 3)), "data")
    givens = {x: data[4 * index : 4 * index + 4]}
    _, messages = noticed(lambda: train.parallel_function([index], loss, updates=new, givens=givens))
    assert_noticed(messages, A_SUM)

    z = tt.dmatrix("z")
    _, messages = noticed(
        lambda: train.parallel_function([z], loss, updates=new, givens={x: tt.tanh(z) / z.shape[0]})
    )
    assert_noticed(messages, None)
    _, messages = noticed(
        lambda: train.parallel_function([z], loss, updates=new, givens={x: tt.tanh(z)})
    )
    assert_noticed(messages, A_SUM)


def test_one_rank_has_the_serial_loss(world_of):
    world_of(1)
    net = Network()
    assert noticed(lambda: as_output(net, net.losses.sum()))[1] == []


@pytest.mark.parametrize("build", [as_output, as_loss, as_marks, as_gradients, as_training])
def test_a_collective_of_the_other_kind_of_loss_is_refused(build):
    for loss_op, other in (("avg", "sum"), ("sum", "avg")):
        net = Network()
        center = synk.ops.all_reduce(net.hidden.mean(axis=0), "avg", loss_op=other)
        rows = tt.sqr(net.hidden - center).sum(axis=1)
        net.params = net.params[:2]
        loss = rows.mean() if loss_op == "avg" else rows.sum()
        with pytest.raises(ValueError, match=f"built with loss_op='{other}'"):
            build(net, loss, loss_op=loss_op)


@pytest.mark.parametrize(("op", "other"), [("avg", "sum"), ("sum", "avg")])
def test_a_gradient_of_a_function_whose_operation_differs_from_its_collective_is_noticed(op, other):
    net = Network()

    def build(loss_op):
        center = synk.ops.all_reduce(net.hidden.mean(axis=0), "avg", loss_op=loss_op)
        rows = tt.sqr(net.hidden - center).sum(axis=1)
        loss = rows.mean() if op == "avg" else rows.sum()
        slope = tt.grad(loss, net.params[0])
        return synk.function([net.x], [(loss, op), (slope, op), (center, "avg")])

    assert_noticed(noticed(lambda: build(op))[1], None)
    pattern = f"output 1 .*loss_op='{other}'.*combined by '{op}'.*loss_op='{op}'"
    assert_noticed(noticed(lambda: build(other))[1], pattern)
