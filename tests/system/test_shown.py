"""Tests of the lines and tables by which training steps, rules, records and loaders are shown."""

import numpy as np
import pytest
from test_shell import Cells, cells_of

import synkhronos as synk
import theano
import theano.tensor as T
from synkhronos.extensions import loading, rules, session, train, updates


def graph():
    x, w = T.dmatrix("x"), theano.shared(np.ones(3), "w")
    return x, w, T.sqr(x.dot(w)).mean()


def test_a_training_step_is_shown_with_its_functions_and_what_it_reduces(open_world):
    open_world(2)
    x, w, loss = graph()
    step = train.make_train_function(loss, [w], x, None, updates.momentum, 0.01)
    assert repr(step) == "<TrainFunction of (x)>"
    first, reduced, second, updated = cells_of(step)
    assert first == ["gradient", "on the rows of each rank"]
    assert reduced == ["all_reduce, avg", "of 1 variable"]
    assert second == ["update", "on each rank"]
    assert updated[0] == "updates" and "w" in updated[1].split(", ")
    named = train.make_train_function(
        loss, [w], x, None, updates.sgd, 0.01, function_options={"name": "train"}, wire=None
    )
    assert repr(named) == "<TrainFunction train of (x)>"
    assert Cells(named._repr_html_()).title == "TrainFunction train of (x)"


@pytest.fixture
def record():
    made = rules.Record(2)
    made.losses, made.seconds, made.samples = [[3.0, 2.0], []], [[0.1, 0.2], []], [[4, 8], []]
    made.validations = [
        {"epoch": 1, "rank": None, "step": 2, "seconds": 0.2, "samples": 8, "loss": 1.5, "error": 0.25}
    ]
    return made


def test_the_loss_of_a_record_is_drawn(record):
    pytest.importorskip("matplotlib")
    assert record._repr_html_().startswith('<img alt="The loss by time and by rows" ')
    assert "<img" not in rules.Record(1)._repr_html_()


def test_other_objects_are_shown(open_world):
    open_world(2)
    x, w, loss = graph()
    f = synk.function([x], {"b": (loss, None), "a": loss}, name="f", mode="FAST_COMPILE")
    step = rules.make_step(loss, [w], [x], updates.sgd, learning_rate=0.1)
    serial = train.make_train_function_theano(loss, [w], x, None, updates.sgd, 0.01)
    new = [(w, w - 0.1 * T.grad(loss, w))]
    rule, data = rules.EASGD(alpha=0.5), synk.data(np.ones((4, 3)), name="x")
    transforms = [loading.RandomCrop(4, padding=1), loading.Mirror(), loading.CenterCrop((2, 3))]
    with loading.Loader(np.arange(12.0), batch_size=4, processes=1) as loader:
        for shown, line, cells in (
            (f, "<synkhronos.Function f>", ["output", "b", "float64", "the master's own"]),
            (train.parallel_function([x], loss, updates=new, name="g"), "<ParallelFunction g of (x)>",
             ["updates", "w"]),
            (serial, "<TrainFunction of (x)>", ["functions", "of the compiler alone, for one process"]),
            (step, "<TrainingStep of 1 parameters>", ["first part", "compute gradients"]),
            (rule, repr(rule), ["alpha", "0.5"]),
            (data, "<Data 'x': float64 (4, 3)>", ["memory", "96 bytes, shared"]),
            (loader, "<Loader: 12 rows, 3 batches an epoch>", ["source", "<Arrays of 12 rows>"]),
        ):  # fmt: skip
            assert repr(shown) == line and cells in cells_of(shown)
        assert repr(loader.shards(2, epochs=2)) == "<Shards: 6 minibatches for each of 2 ranks>"
    assert [repr(one).partition("(")[0] for one in transforms] == ["RandomCrop", "Mirror", "CenterCrop"]
    assert "check" in dir(f) and "set_length" in dir(data)
    with synk.fuse():
        pending = f(np.ones((4, 3)))
        assert repr(pending) == "<pending result: after the block, call result()>"
    assert repr(pending).startswith("<pending result: {")
    with synk.Listener("shown") as listener:
        assert repr(listener) == "<synkhronos.Listener shown, 0 came, 0 died>"
    for center, cells, lock in synk.spmd(shown_in_a_program, w):
        assert center.startswith("<synkhronos.Center ") and cells == [["w", "float64 (3,)"]]
        assert lock == "<synkhronos.ProgramLock log, not held by this rank>"


def shown_in_a_program(rank, w):
    center = rank.center([w])
    return repr(center), cells_of(center), repr(rank.lock("log"))


class Tiny:
    """A model that is only shown."""


def test_a_session_is_shown_with_its_model_and_rule():
    name = f"{__name__}:Tiny"
    made = session.Session(name, rule="BSP", config={"seed": 3})
    assert repr(made).startswith(f"<Session of {name} with BSP(")
    shown = dict(cells_of(made))
    assert shown["model"] == name and shown["options"] == "seed=3" and "BSP" in shown["rule"]
