"""Warnings about results that probably differ from a run on one process, and when none are given."""

import sys
import warnings

import numpy as np
import pytest
import scipy.sparse
import theano
import theano.tensor as tt
from oracle import assert_same
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos.functions.comparing.watch import PATIENCE
from synkhronos.world.launch import _close_at_exit

pytestmark = pytest.mark.usefixtures("in_python", "in_threads")
ROWS, TARGETS = np.arange(12.0).reshape(6, 2), np.array([1.0, 0, 1, 1, 0, 1])
x, y = tt.dmatrix("x"), tt.dvector("y")


def weights(name="w"):
    return theano.shared(np.array([0.5, -0.5]), name)


def loss_of(w):
    return tt.sqr(tt.dot(x, w) - y).mean()


def naive_step(w, rate=0.001):
    loss = loss_of(w)
    return synk.function([x, y], loss, updates=[(w, w - rate * tt.grad(loss, w))], name="train")


def test_replicas_that_train_apart_are_warned_of_after_a_while(two, noticed):
    w = weights()
    step = naive_step(w)
    for _ in range(PATIENCE - 1):
        step(ROWS, TARGETS)
    assert not noticed()
    step(ROWS, TARGETS)
    [text] = noticed()
    assert "train" in text and " w, whose replicas differ" in text
    assert "parallel_function()" in text and "make_train_function()" in text and "all_reduce" in text
    for _ in range(2 * PATIENCE):
        step(ROWS, TARGETS)
    synk.close()
    assert not noticed()
    assert step.watch is None


def test_a_warning_at_the_end_names_the_line_of_the_call(two):
    step = naive_step(weights())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", synk.SynkhronosWarning)
        for _ in range(3):
            step(ROWS, TARGETS)
            called = sys._getframe().f_lineno - 1
        _close_at_exit()
    [one] = caught
    assert (one.filename, one.lineno) == (__file__, called)


def test_updates_of_a_function_that_was_left_to_theano_are_noticed_at_the_next_call(two, noticed):
    w, rate = weights(), theano.shared(0.1, "rate")
    follow = synk.function([], updates=[(w, w * rate)], name="follow")
    evaluate = synk.function([x, y], loss_of(w), name="evaluate")
    follow()
    evaluate(ROWS, TARGETS)
    theano.function([], updates=[(rate, rate / 2)])()
    follow()
    [text] = noticed()
    assert "follow> uses rate, whose replicas differ" in text and "synk.broadcast(variable)" in text
    for _ in range(PATIENCE + 1):  # with other values of w than on the other ranks
        evaluate(ROWS, TARGETS)
    synk.close()
    assert not noticed()


def two_that_train_apart():
    first, second = weights("first"), weights("second")
    loss = loss_of(first) + loss_of(second)
    news = [(one, one - 0.001 * tt.grad(loss, one)) for one in (first, second)]
    return first, second, synk.function([x, y], loss, updates=news, name="train")


def test_a_warning_about_several_variables_leaves_out_those_that_were_combined_since(two, noticed):
    first, second, step = two_that_train_apart()
    for _ in range(2):
        step(ROWS, TARGETS)
    synk.all_reduce(first)
    del first
    synk.close()
    [text] = noticed()
    assert "train> uses second, whose replicas differ" in text


@pytest.mark.parametrize("collective", ["broadcast", "gather", "reduce", "new", "get_value"])
def test_other_collectives_show_too_that_the_script_knows(two, noticed, collective):
    w = weights()
    step = naive_step(w)
    step(ROWS, TARGETS)
    step(ROWS, TARGETS)
    calls = {"get_value": lambda: synk.get_value(1, w), "new": lambda: synk.reduce(w, in_place=False)}
    calls.get(collective, lambda: getattr(synk, collective)(w))()
    for _ in range(PATIENCE):
        step(ROWS, TARGETS)
    synk.close()
    assert not noticed()


def test_a_broadcast_before_the_training_does_not_hide_that_replicas_differ(two, noticed):
    w = weights()
    step = naive_step(w)
    synk.distribute()
    synk.broadcast(w, np.zeros(2))
    for _ in range(PATIENCE):
        step(ROWS, TARGETS)
    assert len(noticed()) == 1


def test_gradients_that_are_all_reduced_leave_nothing_to_say(two, noticed):
    w, grad, rate = weights(), theano.shared(np.zeros(2), "grad"), theano.shared(0.001, "rate")
    loss = loss_of(w)
    gradient = synk.function([x, y], loss, updates=[(grad, tt.grad(loss, w))], name="gradient")
    update = synk.function([], updates=[(w, w - rate * grad)], name="update")
    for count in range(PATIENCE + 2):
        if count % 2:
            with synk.fuse():
                value = gradient(ROWS, TARGETS)
                synk.all_reduce(grad, weights=gradient)
                update()
            assert value.result() > 0
        else:
            gradient(ROWS, TARGETS)
            synk.all_reduce(grad, weights=gradient)
            update()
    assert gradient.watch is None and update.watch is None
    synk.close()
    assert not noticed()


def test_counts_and_states_of_each_rank_may_differ(two, noticed):
    total, count = theano.shared(np.zeros(2), "total"), theano.shared(0.0, "count")
    f = synk.function([x], x.mean(), updates=[(total, total + x.sum(axis=0)), (count, count + 1)])
    for _ in range(PATIENCE + 1):
        f(ROWS)
    result = synk.function([], (total / count, "sum"))()
    assert_same(result, ROWS.sum(axis=0))
    synk.close()
    assert not noticed()


def test_averages_of_each_rank_that_another_function_uses_are_warned_of(two, noticed):
    """As running averages of batch normalization are."""
    mean = theano.shared(np.zeros(2), "running_mean")
    train = synk.function([x], x.mean(), updates=[(mean, 0.9 * mean + 0.1 * x.mean(axis=0))])
    evaluate = synk.function([x], (x - mean).mean(), name="evaluate")
    evaluate(ROWS)
    for _ in range(PATIENCE + 1):
        train(ROWS)
    assert not noticed()
    evaluate(ROWS)
    [text] = noticed()
    assert "evaluate" in text and "running_mean" in text


def test_scattered_rows_and_values_of_single_ranks_are_meant_to_differ(two, noticed):
    chain, w = theano.shared(ROWS[:1], "chain"), weights()
    output = x.mean() + tt.dot(chain, w).mean()
    step = synk.function([x], output, updates=[(chain, tt.tanh(chain) + x[:1])])
    synk.scatter(chain, ROWS[:2])
    for _ in range(PATIENCE + 1):
        step(ROWS)
    own = naive_step(w)
    synk.set_value(1, w, np.ones(2))
    for _ in range(PATIENCE + 1):
        own(ROWS, TARGETS)
    synk.close()
    assert not noticed()


def scaled():
    rate = theano.shared(1.0, "rate")
    return rate, synk.function([x], (x * rate).mean(), name="scaled")


CHANGES = {
    "set_value": lambda rate: rate.set_value(0.5),
    "function": lambda rate: theano.function([], updates=[(rate, rate / 2)])(),
    "borrowed": lambda rate: rate.get_value(borrow=True).fill(0.5),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_value_that_is_changed_on_the_master_only_is_warned_of_at_the_next_call(two, noticed, how):
    rate, f = scaled()
    for _ in range(PATIENCE + 10):
        f(ROWS)
    assert f.watch is None
    CHANGES[how](rate)
    f(ROWS)
    [text] = noticed()
    assert "scaled" in text and "rate, whose replicas differ" in text and "by up to 0.5" in text
    assert "synk.broadcast(variable, value)" in text
    rate.set_value(0.25)
    f(ROWS)
    f(ROWS)
    synk.close()
    assert not noticed()


@pytest.mark.parametrize("op", ["avg", "sum", "max", "gather"])
def test_a_minibatch_that_is_set_on_the_master_only_is_noticed_without_divided_rows(two, noticed, op):
    """A common pattern: `set_value`, then a function without inputs."""
    rows, batch = theano.shared(ROWS, "rows"), tt.dmatrix("batch")
    f = synk.function([], (batch.sum(axis=0), op), givens={batch: rows}, name="f")
    f()
    rows.set_value(ROWS + 1)
    f()
    [text] = noticed()
    assert "f> uses rows, whose replicas differ" in text and "synk.broadcast(variable, value)" in text
    f()
    synk.broadcast(rows, ROWS + 2)
    f()
    g = synk.function([], (rows.sum(), None))  # the master's own value
    g()
    rows.set_value(ROWS + 3)
    assert g() == (ROWS + 3).sum()
    assert not noticed()


def sliced():
    rows = theano.shared(ROWS, "rows")
    return rows, synk.function([], rows.mean(), sliceable_shareds=[rows], name="sliced")


def test_rows_that_are_set_on_the_master_only_are_noticed(two, noticed):
    rows, f = sliced()
    rows.set_value(ROWS + 1)  # before the workers are there
    f()
    rows.set_value(ROWS + 1)  # the same
    f()
    assert not noticed()
    rows.set_value(ROWS + 2)
    f()
    [text] = noticed()
    assert "sliced> uses rows, whose replicas differ" in text and "by up to 1" in text
    assert "synk.scatter(variable, value)" in text
    f()
    assert not noticed()


def test_ranks_may_set_their_own_rows_in_a_program(two, noticed):
    rows, f = sliced()
    f()

    def set_own(rank):
        rows.set_value(ROWS[rank.rank : rank.rank + 1])
        rank.barrier()  # these ranks are threads, and the end of one is the end of the program

    synk.spmd(set_own)
    assert f() == ROWS[:2].mean()
    assert not noticed()


def test_a_value_that_is_broadcast_or_the_same_everywhere_is_not_warned_of(two, noticed):
    rate, f = scaled()
    rate.set_value(0.5)  # before there are workers, which inherit it
    f(ROWS)
    for value in np.linspace(0.5, 1, 12):
        rate.set_value(value)
        synk.broadcast(rate)
        assert_same(f(ROWS), ROWS.mean() * value)
    for _ in range(12):
        rate.set_value(1.0)
        f(ROWS)
    assert_same(f(ROWS), ROWS.mean())
    assert not noticed()


@pytest.mark.parametrize("call", [lambda f: f.as_theano(), lambda f: f.fn()], ids=["as_theano", "fn"])
def test_as_theano_and_fn_change_the_master_only_and_are_noticed(two, noticed, call):
    w = weights()
    f = synk.function([x], tt.dot(x, w).mean())
    double = synk.function([], updates=[(w, w * 2)], mode=theano.Mode("cvm", "fast_compile"))
    f(ROWS)
    before = w.get_value()
    call(double)
    assert_same(w.get_value(), 2 * before)
    f(ROWS)
    [text] = noticed()
    assert "as_theano() and fn() change only" in text


@pytest.mark.parametrize("kind", [MRG_RandomStreams, RandomStreams])
def test_streams_that_are_seeded_on_the_master_only_are_warned_of(two, noticed, kind):
    streams = kind(1)
    streams.seed(2)  # before there are workers, which inherit it
    noise = synk.function([], (streams.uniform((2,)) + streams.normal((2,)), "gather"), name="noise")
    first = noise()
    for _ in range(PATIENCE + 1):
        noise()
    assert noise.watch is None
    streams.seed(2)
    assert not np.array_equal(noise(), first)
    [text] = noticed()
    assert "noise" in text and "draws from 2 random stream(s) whose state was set on the" in text
    assert "synk.reseed(streams, seed)" in text
    streams.seed(2)
    noise()
    assert not noticed()


@pytest.mark.parametrize("kind", [MRG_RandomStreams, RandomStreams])
def test_streams_that_are_seeded_on_all_ranks_are_not_warned_of(two, noticed, kind, tmp_path):
    streams = kind(1)
    noise = synk.function([], (streams.uniform((2,)), "gather"))
    first = noise()
    synk.reseed(streams, 1)
    np.testing.assert_array_equal(noise(), first)
    synk.reseed(streams, 1)
    synk.save(tmp_path / "saved.npz")
    streams.seed(2)
    synk.load(tmp_path / "saved.npz")
    np.testing.assert_array_equal(noise(), first)
    streams.seed(1)
    synk.restart()
    np.testing.assert_array_equal(noise(), first)
    assert not noticed()


def test_a_sparse_matrix_that_is_set_on_the_master_only_is_warned_of(two, noticed):
    held = theano.shared(scipy.sparse.csr_matrix(np.eye(2)), "held")
    dots = synk.function([x], (theano.sparse.dot(x, held), "gather"), name="dots")
    dots(ROWS)
    held.set_value(scipy.sparse.csr_matrix(2 * np.eye(2)))
    np.testing.assert_array_equal(dots(ROWS), np.concatenate([2 * ROWS[:3], ROWS[3:]]))
    [text] = noticed()
    assert "dots" in text and "uses held, set on the master only" in text and "restart()" in text
    synk.restart()
    np.testing.assert_array_equal(dots(ROWS), 2 * ROWS)
    held.set_value(scipy.sparse.csr_matrix(3 * np.eye(2)))
    synk.restart()
    np.testing.assert_array_equal(dots(ROWS), 3 * ROWS)
    assert not noticed()


def test_restart_and_load_make_replicas_equal(two, noticed, tmp_path):
    rate, f = scaled()
    f(ROWS)
    rate.set_value(0.5)
    synk.restart()
    assert_same(f(ROWS), ROWS.mean() * 0.5)
    synk.save(tmp_path / "saved.npz")
    rate.set_value(0.25)
    synk.load(tmp_path / "saved.npz")
    assert_same(f(ROWS), ROWS.mean() * 0.5)
    assert not noticed()


def test_a_warning_that_is_an_error_leaves_the_world_usable(two):
    rate, f = scaled()
    f(ROWS)
    rate.set_value(0.5)
    with pytest.raises(synk.SynkhronosWarning, match="rate"):
        f(ROWS)
    synk.broadcast(rate)
    assert_same(f(ROWS), ROWS.mean() * 0.5)


def test_many_large_variables_are_compared_by_samples(two, noticed):
    several = [theano.shared(np.zeros((300, 400)), f"w{number}") for number in range(8)]
    f = synk.function([x], (x.mean() + sum(one.sum() for one in several), None), name="large")
    f(ROWS)
    for one in several:
        one.set_value(np.ones((300, 400)))
    f(ROWS)
    [text] = noticed()
    assert "w0, w1, w2, w3, w4 and 3 more" in text
