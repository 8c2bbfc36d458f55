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


def test_a_parallel_function_and_the_serial_step_are_shown(open_world):
    open_world(2)
    x, w, loss = graph()
    f = train.parallel_function([x], loss, updates=[(w, w - 0.1 * T.grad(loss, w))], name="f")
    assert repr(f) == "<ParallelFunction f of (x)>" and cells_of(f)[-1] == ["updates", "w"]
    serial = train.make_train_function_theano(loss, [w], x, None, updates.sgd, 0.01)
    assert repr(serial) == "<TrainFunction of (x)>"
    assert cells_of(serial) == [["functions", "of the compiler alone, for one process"]]


def test_a_step_of_a_rule_and_the_rule_are_shown(open_world):
    open_world(2)
    x, w, loss = graph()
    step = rules.make_step(loss, [w], [x], updates.sgd, learning_rate=0.1)
    assert repr(step) == "<TrainingStep of 1 parameters>"
    assert cells_of(step) == [
        ["parameters", "w"], ["inputs", "x"], ["first part", "compute gradients"],
        ["second part", "update"],
    ]  # fmt: skip
    rule = rules.EASGD(alpha=0.5)
    assert "alpha=0.5" in repr(rule) and ["alpha", "0.5"] in cells_of(rule)
    assert Cells(rule._repr_html_()).title == "Training rule EASGD"


@pytest.fixture
def record():
    made = rules.Record(2)
    made.losses, made.seconds, made.samples = [[3.0, 2.0], []], [[0.1, 0.2], []], [[4, 8], []]
    made.validations = [
        {"epoch": 1, "rank": None, "step": 2, "seconds": 0.2, "samples": 8, "loss": 1.5, "error": 0.25}
    ]
    return made


def test_a_record_is_shown_with_its_losses_and_validations(record):
    assert cells_of(record) == [
        ["", "steps", "last loss", "seconds", "rows"],
        ["rank 0", "2", "2", "0.2", "8"],
        ["rank 1", "0", "", "", ""],
        ["epoch", "loss", "error"],
        ["1", "1.5", "0.25"],
    ]
    assert len(cells_of(rules.Record(1))) == 2
    assert len(cells_of(session.Recorder(2, print_every=0))) == 3


def test_the_loss_of_a_record_is_drawn(record):
    pytest.importorskip("matplotlib")
    assert record._repr_html_().startswith('<img alt="The loss by time and by rows" ')
    assert "<img" not in rules.Record(1)._repr_html_()


class Tiny:
    """A model that is only shown."""


def test_a_session_is_shown_with_its_model_and_rule():
    name = f"{__name__}:Tiny"
    made = session.Session(name, rule="BSP", config={"seed": 3})
    assert repr(made).startswith(f"<Session of {name} with BSP(")
    shown = dict(cells_of(made))
    assert shown["model"] == name and shown["options"] == "seed=3" and "BSP" in shown["rule"]


def test_a_loader_its_source_and_transforms_are_shown():
    transforms = [loading.RandomCrop(4, padding=1), loading.Mirror(), loading.CenterCrop((2, 3))]
    assert list(map(repr, transforms)) == [
        "RandomCrop(size=(4, 4), padding=1, per='image')", "Mirror(per='image', probability=0.5)",
        "CenterCrop(size=(2, 3))",
    ]  # fmt: skip
    with loading.Loader(np.arange(12.0), batch_size=4, processes=1) as loader:
        assert repr(loader) == "<Loader: 12 rows, 3 batches an epoch>"
        shown = dict(cells_of(loader))
        assert shown["source"] == "<Arrays of 12 rows>" and shown["batch size"] == "4"
        shards = loader.shards(2, epochs=2)
        assert repr(shards) == "<Shards: 6 minibatches for each of 2 ranks>"
    assert repr(loader) == "<Loader: 12 rows, closed>"


def texts_of_a_program(rank, w):
    center, lock = rank.center([w]), rank.lock("log")
    before = repr(lock)
    with lock:
        return repr(center), center._repr_html_(), before, repr(lock)


def test_a_center_and_a_lock_are_shown(open_world):
    open_world(2)
    w = theano.shared(np.ones(3), "w")
    synk.function([], updates=[(w, w + 1)], mode="FAST_COMPILE")
    for center, table, before, held in synk.spmd(texts_of_a_program, w):
        assert center.startswith("<synkhronos.Center ") and center.endswith(" of 1 variables>")
        assert Cells(table).rows == [["w", "float64 (3,)"]]
        assert before == "<synkhronos.ProgramLock log, not held by this rank>"
        assert held == "<synkhronos.ProgramLock log, held by this rank>"


def test_a_pending_result_and_a_listener_are_shown(open_world):
    open_world(2)
    x = T.dvector("x")
    f = synk.function([x], x.mean(), mode="FAST_COMPILE")
    with synk.fuse():
        pending = f(np.ones(4))
        assert repr(pending) == "<pending result: after the block, call result()>"
    assert repr(pending) == "<pending result: array(1.)>"
    with synk.Listener("shown") as listener:
        assert repr(listener) == "<synkhronos.Listener shown, 0 came, 0 died>"
    assert repr(listener) == "<synkhronos.Listener shown, closed>"
