"""`make_train_function` with update rules of any origin, against the serial step."""

from collections import OrderedDict

import numpy as np
import pytest
from steps import Network, assert_same_results, assert_same_values, batches, digits

import synkhronos as synk
from compilers import NAME, Streams, change_flags, clone, compiler, default_mode, sigmoid, tt
from synkhronos.extensions import train, updates

pytestmark = pytest.mark.usefixtures("two", "in_python")


def lasagne_updates():
    return pytest.importorskip("lasagne.updates")


def an_adam():
    return lasagne_updates().adam if NAME == "theano" else updates.adam


def by_gradients(gradients, params, rate):
    return [(param, param - rate * one) for param, one in zip(params, gradients)]


def by_loss(cost, params, rate):
    """As in the scripts that compute the gradients in the rule; each for itself, with clipping."""
    new = OrderedDict()
    for param in params:
        gradient = tt.clip(tt.grad(cost=cost, wrt=param), -0.05, 0.05)
        average = compiler.shared(param.get_value() * 0)
        new[average] = 0.9 * average + 0.1 * gradient**2
        new[param] = param - rate * gradient / tt.sqrt(new[average] + 1e-4)
    return new


def by_neither(what, where, rate):
    return [(one, one - rate * slope) for one, slope in zip(where, what)]


def loss_by_another_name(objective, weights, rate):
    return by_gradients(tt.grad(objective, weights), weights, rate)


class ParametersFirst:
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, params, cost):
        return by_gradients(tt.grad(cost, params), params, self.rate)


class Optimizer:
    """With the interface, and the way to compute, of the optimizers of Keras 2.3.1."""

    def __init__(self, rate, clipnorm):
        self.rate = compiler.shared(rate, "rate")
        self.iterations = compiler.shared(np.int64(0), "iterations")
        self.clipnorm = clipnorm
        self.weights = [self.iterations]

    def get_gradients(self, loss, params):
        gradients = tt.grad(loss, params)
        norm = tt.sqrt(sum(tt.sum(tt.square(one)) for one in gradients))
        large = tt.ge(norm, self.clipnorm)
        return [tt.switch(large, one * self.clipnorm / norm, one) for one in gradients]

    def get_updates(self, loss, params):
        gradients = self.get_gradients(loss, params)
        found = [(self.iterations, self.iterations + 1)]
        rate = self.rate / (1.0 + 0.1 * tt.cast(self.iterations, "float64"))
        moments = [compiler.shared(np.zeros(one.get_value().shape)) for one in params]
        self.weights = [self.iterations, *moments]
        for param, gradient, moment in zip(params, gradients, moments):
            velocity = 0.9 * moment - rate * gradient
            found += [(moment, velocity), (param, param + 0.9 * velocity - rate * gradient)]
        return found


RULES = {
    "ours": lambda: (updates.adam, {"learning_rate": 0.05}),
    "Lasagne's adam": lambda: (lasagne_updates().adam, {"learning_rate": 0.05}),
    "Lasagne's momentum": lambda: (lasagne_updates().nesterov_momentum, {"learning_rate": 0.1}),
    "gradients": lambda: (by_gradients, {"rate": 0.3}),
    "loss": lambda: (by_loss, {"rate": 0.02}),
    "neither": lambda: (by_neither, {"rate": 0.3}),
    "loss by another name": lambda: (loss_by_another_name, {"rate": 0.3}),
    "parameters first": lambda: (ParametersFirst(0.3), {}),
    "Keras": lambda: (Optimizer(0.05, 0.1), {}),
}


def compare(make_step, network_of=Network, inputs=lambda rows: (), tolerances=None):
    """Take steps of both functions that `make_step` returns for a network and the function to make."""
    tolerances = tolerances or {}
    networks = [network_of(), network_of()]
    makers = [train.make_train_function, train.make_train_function_theano]
    ours, theirs = [make_step(network, make) for network, make in zip(networks, makers)]
    x, y = digits(networks[0].params[0].dtype)
    for rows in batches():
        result = ours(x, y, *inputs(rows), batch=rows)
        expected = theirs(x, y, *inputs(rows), batch=rows)
        assert_same_results(result, expected, **tolerances)
        assert_same_values(networks[0].params, networks[1].params, **tolerances)
    moved = np.abs(networks[1].params[0].get_value() - network_of().params[0].get_value()).max()
    assert moved > 0.01  # the steps were steps
    return networks


@pytest.mark.parametrize("name", RULES)
def test_any_rule_equals_the_serial_step(name):
    def make_step(network, make):
        rule, arguments = RULES[name]()
        return make(network.loss, network.params, network.x, network.y, rule, **arguments)

    compare(make_step)


@pytest.mark.parametrize("kind", [dict, OrderedDict, list, tuple])
def test_ready_updates_are_a_rule(kind):
    def make_step(network, make):
        pairs = by_loss(network.loss, network.params, 0.02).items()
        return make(network.loss, network.params, network.x, network.y, kind(pairs))

    compare(make_step)


def test_marked_gradients_may_be_of_another_loss():
    """The gradient of a loss that the step does not know, by hand."""

    def make_step(network, make):
        gradients = train.gradients(2 * network.loss, network.params)
        ready = by_gradients(gradients, network.params, 0.1)
        return make(network.loss, network.params, network.x, network.y, ready)

    compare(make_step)


def test_compiled_with_all_optimizations():
    def make_step(network, make):
        return make(
            network.loss + network.penalty, network.params, network.x, network.y,
            an_adam(), 0.05, outputs=[network.accuracy],
        )  # fmt: skip

    with change_flags(floatX="float32"), default_mode("FAST_RUN"):
        compare(make_step, lambda: Network("float32"), tolerances={"rtol": 2e-3, "atol": 1e-5})


@pytest.mark.parametrize("rule", [updates.sgd, by_gradients, by_loss])
def test_outputs_follow_the_loss(rule):
    def make_step(network, make):
        norm = tt.sqrt(sum(tt.sqr(one).sum() for one in tt.grad(network.loss, network.params)))
        return make(
            network.loss, network.params, network.x, network.y, rule, 0.05,
            outputs=[network.accuracy, norm, tt.exp(network.loss), network.penalty],
        )  # fmt: skip

    compare(make_step)


def test_outputs_have_operations():
    network = Network()
    step = train.make_train_function(
        network.loss, network.params, network.x, network.y, updates.sgd, 0.1,
        outputs=[(network.hidden, "gather"), (network.x.max(), "max"), (network.x.sum(), "c_sum")],
    )  # fmt: skip
    x, y = digits()
    hidden = compiler.function([network.x], network.hidden)(x)
    result = step(x, y)
    np.testing.assert_allclose(result[1], hidden)
    np.testing.assert_allclose(result[2:], [x.max(), x.sum()])


def test_a_learning_rate_may_be_a_shared_variable_or_an_input():
    rates = []

    def make_step(network, make):
        shared_rate, rate = network.shared(0.3, "shared_rate"), tt.dscalar("rate")
        rates.append(shared_rate)
        return make(
            network.loss, network.params, network.x, network.y, by_gradients, rate * shared_rate,
            bcast_inputs=[rate], updates=[(shared_rate, 0.95 * shared_rate)],
        )  # fmt: skip

    compare(make_step, inputs=lambda rows: (len(rows) / 40,))
    assert_same_values(rates[:1], rates[1:])


@pytest.mark.parametrize("rule", ["ours", "Lasagne's adam", "loss", "Keras"])
@pytest.mark.parametrize("with_penalty", [False, True])
def test_sums_are_added_and_penalties_count_once(rule, with_penalty):
    def make_step(network, make):
        found, arguments = RULES[rule]()
        loss = network.losses.sum() + (network.penalty if with_penalty else 0)
        return make(
            loss, network.params, network.x, network.y, found, loss_op="sum",
            outputs=[network.accuracy, loss / 2], **arguments,
        )  # fmt: skip

    compare(make_step)


def test_a_scaled_sum_of_a_loss_and_penalties():
    def make_step(network, make):
        w1, b1, w2, b2 = network.params
        data = network.losses.sum()
        loss = 0.5 * (data - 0.01 * tt.sqr(w1).sum() + abs(w2).sum() * 0.02) / 2 + tt.sqr(b1).sum()
        loss = tt.cast(loss, "float64") - (-(0.1 * tt.sqr(b2)).sum())
        return make(loss, network.params, network.x, network.y, by_gradients, 0.02, loss_op="sum")

    compare(make_step)


@pytest.mark.parametrize("rule", [updates.adam, by_loss], ids=["ours", "another"])
def test_the_master_may_be_any_rank_and_have_no_rows(world_of, rule):
    world_of(3, master_rank=1)
    counts = []

    def make_step(network, make):
        count = compiler.shared(0, "count")
        counts.append(count)
        loss = network.losses.sum() + network.penalty
        return make(
            loss, network.params, network.x, network.y, rule, 0.02, loss_op="sum",
            outputs=[network.accuracy, tt.sqrt(loss), network.penalty],
            updates=[(count, count + network.x.shape[0], "sum")],
        )  # fmt: skip

    compare(make_step)
    assert_same_values(counts[:1], counts[1:])


def test_a_rule_of_the_same_interface_with_unknown_gradients_refuses_a_penalty_in_a_sum():
    def rule(loss, params):
        return updates.sgd(tt.grad(2 * loss, params), params, 0.01)

    network = Network()
    loss = network.losses.sum()
    train.make_train_function(loss, network.params, network.x, network.y, rule, loss_op="sum")
    with pytest.raises(ValueError, match="a term that is the same on every rank"):
        train.make_train_function(
            loss + network.penalty, network.params, network.x, network.y, rule, loss_op="sum"
        )


@pytest.mark.parametrize("rule", [updates.adam, by_loss], ids=["ours", "another"])
def test_slices_do_not_change_the_step(rule):
    networks = [Network(), Network()]
    counts = [compiler.shared(0, "count") for _ in networks]
    steps = [
        train.make_train_function(
            network.losses.sum() + network.penalty, network.params, network.x, network.y, rule, 0.02,
            loss_op="sum", outputs=network.accuracy,
            updates=[(count, count + network.x.shape[0], "sum")],
        )
        for network, count in zip(networks, counts)
    ]  # fmt: skip
    for rows in batches(6):
        whole = steps[0](*digits(), batch=rows)
        assert_same_results(steps[1](*digits(), batch=rows, num_slices=3), whole)
    assert_same_values(networks[0].params, networks[1].params)
    assert_same_values(counts[:1], counts[1:])
    assert counts[0].get_value() == sum(len(rows) for rows in batches(6))


def test_ranks_draw_their_own_dropout_and_have_the_same_parameters():
    network = Network()
    kept = tt.cast(Streams(6).uniform(size=network.x.shape) < 0.5, "float64")
    loss = clone(network.loss, {network.x: network.x * kept})
    step = train.make_train_function(
        loss, network.params, network.x, network.y, an_adam(), 0.01,
        outputs=[(kept, "gather")],
    )  # fmt: skip
    for _ in range(3):
        _, drawn = step(*digits())
        half = (len(drawn) + 1) // 2
        assert (drawn[:half][: len(drawn) - half] != drawn[half:]).any()
    for param in network.params:
        first, second = synk.gather(param)
        np.testing.assert_array_equal(first, second)


def test_a_gan_is_two_functions_that_share_parameters():
    def make_steps(make):
        rng = np.random.RandomState(7)
        x, z = tt.dmatrix("x"), tt.dmatrix("z")
        generator = [compiler.shared(rng.randn(2, 5) / 2, "g"), compiler.shared(np.zeros(5), "gb")]
        judge = [compiler.shared(rng.randn(5, 1) / 2, "d"), compiler.shared(np.zeros(1), "db")]
        made = tt.tanh(tt.dot(z, generator[0]) + generator[1])
        of_real, of_made = [sigmoid(tt.dot(one, judge[0]) + judge[1].sum()) for one in (x, made)]
        loss_of_judge = -tt.log(of_real).mean() - tt.log(1 - of_made).mean()
        loss_of_generator = -tt.log(of_made).mean()
        adam = an_adam()
        return generator + judge, [
            make(loss_of_judge, judge, [x, z], None, adam, 0.02, outputs=loss_of_generator),
            make(loss_of_generator, generator, z, None, adam, 0.02),
        ]

    ours, steps = make_steps(train.make_train_function)
    theirs, serial_steps = make_steps(train.make_train_function_theano)
    x, _ = digits()
    z = np.random.RandomState(8).randn(len(x), 2)
    for rows in batches():
        result = steps[0]([x, z], batch=rows)
        assert_same_results(result, serial_steps[0]([x, z], batch=rows))
        assert_same_results(steps[1](z, batch=rows), serial_steps[1](z, batch=rows))
        assert_same_values(ours, theirs)


@pytest.mark.parametrize("rule", [updates.adam, by_loss], ids=["ours", "another"])
def test_a_step_of_any_kind_is_one_command(monkeypatch, rule):
    network = Network()
    mean = network.shared(np.zeros(4))
    step = train.make_train_function(
        network.losses.sum() + network.penalty, network.params, network.x, network.y, rule, 0.02,
        loss_op="sum", outputs=[network.accuracy], updates=[(mean, network.hidden.mean(axis=0))],
    )  # fmt: skip
    step(*digits())
    transport, posts = synk.world.world.current_world().transport, []
    post = transport.post
    monkeypatch.setattr(transport, "post", lambda *sent: (posts.append(sent), post(*sent)))
    step(*digits())
    assert len(posts) == 1


@pytest.mark.parametrize("rule", [updates.adam, updates.sgd_nonflat, by_loss])
@pytest.mark.parametrize("bad_row", [0, -1], ids=["master", "worker"])
def test_a_step_that_fails_on_one_rank_is_taken_by_none(bad_row, rule):
    network, serial = Network(), Network()
    mean = network.shared(np.zeros(4), "mean")
    step = train.make_train_function(
        network.losses.sum(), network.params, network.x, network.y, rule, 0.02, loss_op="sum",
        updates=[(mean, network.hidden.mean(axis=0))],
    )  # fmt: skip
    other = train.make_train_function_theano(
        serial.losses.sum(), serial.params, serial.x, serial.y, rule, 0.02
    )
    x, y = map(synk.data, digits())
    for rows in (None, 2):
        np.testing.assert_allclose(step(x, y, batch=rows), other(*digits(), batch=rows))
        before = [synk.gather(one) for one in [*network.params, mean]]
        y[bad_row] = 7  # there is no such class
        with pytest.raises((ValueError, IndexError, AssertionError, synk.WorkerError)):
            step(x, y)
        y[bad_row] = digits()[1][bad_row]
        for one, values in zip([*network.params, mean], before):
            np.testing.assert_array_equal(synk.gather(one), values)
    # One row is the share of one rank; the other has to forget the sums of the failed step.
    np.testing.assert_allclose(step(x, y, batch=1), other(*digits(), batch=1))
    assert_same_values(network.params, serial.params)


def test_wrong_rules_are_refused():
    network = Network()
    start = (network.loss, network.params, network.x, network.y)
    for wrong, message in (
        (None, "expected a rule"),
        (0.1, "expected a function such as updates.adam"),
        ([(network.params[0], 1, "avg", "sum")], "expected \\(shared, new\\)"),
        ([network.params[0]], "expected \\(shared, new\\)"),
        ([(network.x, network.x)], "expected a shared variable"),
    ):
        with pytest.raises(TypeError, match=message):
            train.make_train_function(*start, wrong)
    with pytest.raises(TypeError, match="take no arguments"):
        train.make_train_function(*start, [(network.params[0], network.params[0])], 0.1)
    with pytest.raises(TypeError, match="y: expected a variable.*give None in its place"):
        train.make_train_function(network.loss, network.params, network.x, updates.sgd, 0.1)
    with pytest.raises(ValueError, match="loss_op: expected 'avg' or 'sum', got 'mean'"):
        train.make_train_function(*start, updates.sgd, 0.1, loss_op="mean")
    with pytest.raises(ValueError, match="updated more than once"):
        train.make_train_function(
            *start, updates.sgd, 0.1, updates=[(network.params[0], network.params[0])]
        )
