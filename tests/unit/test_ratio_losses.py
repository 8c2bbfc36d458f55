"""Losses that divide by a sum over the rows, such as masked means, equal one process."""

import numpy as np
import pytest
import theano
import theano.tensor as tt
from theano.sandbox.rng_mrg import MRG_RandomStreams

import synkhronos as synk
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function, parallel_function

pytestmark = pytest.mark.usefixtures("in_python", "in_threads")
x, m = tt.dmatrix("x"), tt.dvector("m")
ROWS = np.arange(14.0).reshape(7, 2) / 5
FULL, PARTLY, LATE = np.ones(7), np.array([1.0, 0, 0, 1, 0, 1, 1]), np.array([0.0, 0, 0, 0, 0, 0, 1])


def masked_mean(w):
    return (tt.sqr(tt.dot(x, w) - 1) * m).sum() / (m.sum() + 1e-6)


def counts_of(labels):
    return tt.extra_ops.to_one_hot(tt.cast(labels, "int8"), 2).sum(axis=0)


def built(loss_of, build=parallel_function, **more):
    w = theano.shared(np.array([0.3, -0.2]), "w")
    loss = loss_of(w)
    return w, build([x, m], loss, updates=[(w, w - 0.1 * tt.grad(loss, w))], **more)


def after(step, w, masks=(FULL, PARTLY, LATE), **call):
    losses = [np.asarray(step(ROWS, mask, **call)) for mask in masks]
    return losses, w.get_value()


LOSSES = {
    "masked mean": masked_mean,
    "and a penalty": lambda w: masked_mean(w) + tt.sqr(w).sum(),
    "two masks": lambda w: masked_mean(w) + (tt.dot(x, w) * (1 + m)).sum() / (1 + m).sum(),
    "by the mean of the mask": lambda w: (tt.dot(x, w) * m).mean() / (0.5 + m.mean()),
    "by a count that is at least one": lambda w: (tt.dot(x, w) * m).sum() / tt.maximum(m.sum(), 1),
    "by the root of a sum": lambda w: (tt.dot(x, w) * m).sum() / tt.sqrt(1 + tt.sqr(m).sum()),
    "columns less their means": lambda w: tt.sqr(
        tt.dot((x - x.mean(axis=0)) / (1 + x.std(axis=0)), w) - m
    ).mean(),
    "by the rows of each class": lambda w: (tt.dot(x, w) / counts_of(m)[tt.cast(m, "int8")]).sum() / 2,
    "a mean, by a count that is at least three": lambda w: tt.dot(x, w).mean() / tt.maximum(m.sum(), 3),
    "by an integer": lambda w: (tt.dot(x, w) * m).sum() / (m > 0).sum() + tt.sqr(w).sum(),
    "by an integer, clipped": lambda w: (
        (theano.gradient.grad_clip(tt.dot(x, w), -0.02, 0.02) * m).sum() / (m > 0).sum()
    ),
    "inputs less their mean": lambda w: tt.sqr(tt.dot(x - x.mean(), w) - m).mean(),
    "of a loop along the columns": lambda w: (
        (
            theano.scan(
                lambda column, state: tt.tanh(column * w[0] + state),
                sequences=[x.T],
                outputs_info=[tt.zeros_like(m)],
            )[0][-1]
            * m
        ).sum()
        / (m.sum() + 1)
    ),
    "a clipped gradient": lambda w: (
        (theano.gradient.grad_clip(tt.dot(x, w), -0.02, 0.02) * m).sum() / (m.sum() + 1)
    ),
}


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_divides_by_a_sum_over_the_rows_equals_one_process(world_of, recwarn, name, size):
    losses, expected = after(*reversed(built(LOSSES[name], theano.function)))
    world_of(size)
    w, step = built(LOSSES[name])
    found, value = after(step, w)
    np.testing.assert_allclose(found, losses)
    np.testing.assert_allclose(value, expected)
    assert not [one for one in recwarn if issubclass(one.category, synk.SynkhronosWarning)]


def test_in_slices_of_a_part_of_the_rows_and_by_check(two):
    w, step = built(masked_mean)
    step.check(ROWS, PARTLY)
    found, value = after(step, w, num_slices=2, batch=[6, 1, 2, 3, 5])
    chosen = [6, 1, 2, 3, 5]
    w, serial = built(masked_mean, theano.function)
    losses = [serial(ROWS[chosen], mask[chosen]) for mask in (FULL, PARTLY, LATE)]
    np.testing.assert_allclose(found, losses)
    np.testing.assert_allclose(value, w.get_value())


def test_a_training_function(world_of):
    world_of(3)
    w = theano.shared(np.array([0.3, -0.2]), "w")
    train = make_train_function(masked_mean(w), [w], x, m, updates.momentum, learning_rate=0.1)
    train.check(ROWS, PARTLY)


@pytest.mark.parametrize("rule", [updates.momentum, updates.sgd_nonflat])
def test_a_training_function_of_a_loss_that_divides_by_an_integer(two, rule):
    w = theano.shared(np.array([0.3, -0.2]), "w")
    loss = LOSSES["by an integer"](w)
    train = make_train_function(loss, [w], x, m, rule, learning_rate=0.1)
    train.check(ROWS, PARTLY)
    step = make_train_function(loss - tt.sqr(w).sum(), [w], x, m, rule, learning_rate=0.1)
    step.check(ROWS, PARTLY)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda w: tt.sqrt(tt.sqr(tt.dot(x, w) - m).mean()),
        lambda w: (tt.dot(x, w) * m).sum() / (tt.sqr(tt.dot(x, w)).sum() + 1),
        lambda w: (
            theano.scan(lambda c: tt.sqr(tt.tanh(c * w[0]).mean()) + c, sequences=[x.T])[0].mean()
            + m.mean()
        ),
        lambda w: tt.log((tt.sqr(tt.dot(x, w)) * m).sum() / m.sum()),
    ],
    ids=["of a parameter", "a divisor of parameters", "in a loop", "not a mean"],
)
def test_other_losses_are_still_warned_of(two, loss_of):
    _, step = built(loss_of)
    with pytest.warns(synk.SynkhronosWarning):
        step(ROWS, PARTLY)


def test_a_random_divisor_and_a_stated_output_stay_as_they_are(two):
    keep = tt.cast(MRG_RandomStreams(1).uniform(m.shape) < 0.5, "float64")
    _, step = built(lambda w: (tt.dot(x, w) * keep * m).sum() / (keep.sum() + 1))
    with pytest.warns(synk.SynkhronosWarning, match="quotient"):
        step(ROWS, PARTLY)
    w = theano.shared(np.array([0.3, -0.2]), "w")
    total = m.sum()
    loss = (tt.dot(x, w) * m).sum() / total
    step = parallel_function([x, m], [loss, (total, "sum")], updates=[(w, w - 0.1 * tt.grad(loss, w))])
    with pytest.warns(synk.SynkhronosWarning):
        assert step(ROWS, PARTLY)[1] == 4


def test_a_running_mean_of_what_the_loss_uses_is_that_of_all_rows(world_of):
    values = []
    for build in (theano.function, parallel_function):
        if build is parallel_function:
            world_of(3)
        running, mean = theano.shared(0.5, "running"), x.mean()
        w = theano.shared(np.array([0.3, -0.2]), "w")
        loss = tt.sqr(tt.dot(x - mean, w) - m).mean()
        news = [(w, w - 0.1 * tt.grad(loss, w)), (running, 0.9 * running + 0.1 * mean)]
        step = build([x, m], [loss, mean], updates=news)
        found = [np.asarray(step(ROWS + one, PARTLY)) for one in range(3)]
        values.append([*np.ravel(found), *w.get_value(), running.get_value()])
    np.testing.assert_allclose(*values)


@pytest.mark.parametrize("size", [2, 3])
def test_other_outputs_are_divided_by_the_integer_of_all_rows(world_of, recwarn, size):
    values = []
    for build in (theano.function, parallel_function):
        if build is parallel_function:
            world_of(size)
        w, count = theano.shared(np.array([0.3, -0.2]), "w"), (m > 0).sum()
        loss = (tt.dot(x, w) * m).sum() / count + tt.sqr(w).sum()
        right = (tt.gt(tt.dot(x, w), 0.1) * m).sum() / count
        news = [(w, w - 0.1 * tt.grad(loss, w))]
        step = build([x, m], [loss, right, x.mean() / count], updates=news)
        values.append([*np.ravel([step(ROWS, mask) for mask in (FULL, PARTLY, LATE)]), *w.get_value()])
    np.testing.assert_allclose(*values)
    assert not [one for one in recwarn if issubclass(one.category, synk.SynkhronosWarning)]


def test_an_output_that_divides_by_another_sum_is_warned_of(two):
    w, count, late = theano.shared(np.array([0.3, -0.2]), "w"), (m > 0).sum(), (m[:, None] * x).mean()
    loss = (tt.dot(x, w) * m).sum() / count
    outputs = [loss, (tt.gt(tt.dot(x / count, w), 0) * m).sum() / late]
    step = parallel_function([x, m], outputs, updates=[(w, w - 0.1 * tt.grad(loss, w))])
    with pytest.warns(synk.SynkhronosWarning, match="output 1"):
        step(ROWS, FULL)


def test_a_running_mean_by_an_integer_is_warned_of(two):
    w, running, count = theano.shared(np.array([0.3, -0.2]), "w"), theano.shared(0.0, "r"), (m > 0).sum()
    loss = (tt.dot(x, w) * m).sum() / count
    news = [(w, w - 0.1 * tt.grad(loss, w)), (running, 0.9 * running + (x[:, 0] * m).sum() / count)]
    step = parallel_function([x, m], loss, updates=news)
    with pytest.warns(synk.SynkhronosWarning):
        step(ROWS, PARTLY)
