"""Tests of `on_step`: what it is told of calls and training steps, and that it breaks nothing."""

import numpy as np
import pytest

import synkhronos as synk
import theano
import theano.tensor as T
from synkhronos.extensions import rules, train, updates


@pytest.fixture
def told(world_of):
    world_of(2)
    reports = []
    with synk.on_step(reports.append):
        yield reports


def training_step(**options):
    x, w = T.dmatrix("x"), theano.shared(np.ones(3), "w")
    loss = T.sqr(x.dot(w)).mean()
    return train.make_train_function(loss, [w], x, None, updates.sgd, 0.01, **options)


def test_a_call_is_reported_with_its_rows_and_outputs(told):
    x = T.dvector("x")
    f = synk.function([x], [x.mean(), (x, "gather")], name="f")
    outputs = f(np.arange(5.0))
    data = synk.data(np.arange(8.0))
    f(data, batch=slice(1, 4))
    f(data, batch=slice(2, 4), num_slices=2)
    assert [(one.number, one.name, one.rows, one.loss) for one in told] == [
        (1, "f", 5, 2.0), (2, "f", 3, 2.0), (3, "f", 2, 2.5)
    ]  # fmt: skip
    assert told[0].outputs is outputs and all(one.seconds > 0 for one in told)


def test_a_training_step_is_one_step(told):
    step, data = training_step(), synk.data(np.ones((10, 3)))
    losses = [step(data, batch=rows) for rows in (10, 10, 5, [3, 2, 1])]
    assert [one.name for one in told] == ["step"] * 4
    assert [one.rows for one in told] == [10, 10, 5, 3]
    assert [one.loss for one in told] == [float(one) for one in losses]


def test_a_step_has_the_name_and_form_that_the_script_gave(told):
    x, w = T.dvector("x"), theano.shared(1.0, "w")
    loss = T.sqr(x - w).mean()
    updated = [(w, w - 0.1 * T.grad(loss, w))]
    step = train.parallel_function([x], {"cost": loss}, updates=updated, name="train")
    step([1.0, 3.0])
    training_step(function_options={"name": "named"}, outputs=[])(np.ones((4, 3)))
    assert [(one.name, one.rows) for one in told] == [("train", 2), ("named", 4)]
    assert list(told[0].outputs) == ["cost"] and told[0].loss == 2.0
    assert told[1].loss == 9.0


def test_calls_of_a_block_and_of_the_function_itself_are_no_steps(two):
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"), name="f")
    seen = []

    def validate(step):
        seen.append((step.name, float(f(np.ones(4)))))

    with synk.on_step(validate):
        with synk.fuse():
            f(np.ones(3))
        assert seen == []
        f(np.ones(2))
    assert seen == [("f", 4.0)]


def test_an_error_is_raised_by_the_call_and_breaks_nothing(two):
    step, rows = training_step(), np.ones((4, 3))

    def fail(report):
        raise ZeroDivisionError(f"in step {report.number}")

    hook = synk.on_step(fail)
    for number in (1, 2):
        with pytest.raises(ZeroDivisionError, match=f"in step {number}"):
            step(rows)
    hook.remove()
    assert float(step(rows)) < 9.0  # the steps were taken
    assert synk.in_sync()


def test_functions_are_called_in_order_until_they_are_removed(two):
    x = T.dvector("x")
    f, seen = synk.function([x], (x.sum(), "sum")), []
    first = synk.on_step(lambda step: seen.append("first"))
    second = synk.on_step(lambda step: seen.append("second"))
    f(np.ones(2))
    first.remove()
    first.remove()
    f(np.ones(2))
    assert seen == ["first", "second", "second"]
    assert repr(first).endswith(", removed>") and not repr(second).endswith(", removed>")
    synk.restart()
    f(np.ones(2))
    assert seen[3:] == ["second"]
    second.remove()


def test_a_function_without_rows_has_none(told):
    w = theano.shared(np.ones(3), "w")
    synk.function([], updates=[(w, w + 1)], name="add")()
    synk.function([], (w.sum(), None), name="sum", sliceable_shareds=[w])()
    assert [(one.name, one.rows) for one in told] == [("add", 0), ("sum", 6)]


def test_a_failed_call_is_no_step(told):
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    with pytest.raises(TypeError):
        f(np.ones((2, 2)))
    assert told == []


def test_steps_of_a_training_rule_are_those_of_the_master(told):
    x, w = T.dvector("x"), theano.shared(0.0, name="w")
    step = rules.make_step(T.sqr(x - w).mean(), [w], [x], updates.sgd, learning_rate=0.1)
    told.clear()
    record = rules.train(step, [w], [np.arange(8.0)], rules.BSP(), batch_size=2, epochs=2)
    own = [one for one in told if one.name == "step"]
    assert [one.loss for one in own] == record.losses[0]
    assert [one.rows for one in own] == [2] * len(own)


def test_only_a_function_is_accepted(world_of):
    world_of(1)
    with pytest.raises(TypeError, match="on_step: expected a function that takes a StepReport, got 3"):
        synk.on_step(3)
