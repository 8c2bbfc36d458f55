"""Tests of the lines and tables by which training steps, rules, records and loaders are shown."""

import numpy as np
import pytest
from test_shell import Cells, cells_of

import theano
import theano.tensor as T
from synkhronos.extensions import rules, session, train, updates


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


class Tiny:
    """A model that is only shown."""


def test_a_session_is_shown_with_its_model_and_rule():
    name = f"{__name__}:Tiny"
    made = session.Session(name, rule="BSP", config={"seed": 3})
    assert repr(made).startswith(f"<Session of {name} with BSP(")
    shown = dict(cells_of(made))
    assert shown["model"] == name and shown["options"] == "seed=3" and "BSP" in shown["rule"]
