"""Tests of what IPython, Jupyter and ``help`` show: names, objects, errors, and tables."""

import contextlib
import io
import os
from html.parser import HTMLParser

import numpy as np
import pytest
import theano
import theano.tensor as tt
from processes import own_process

import synkhronos as synk
from synkhronos import _html
import theano.tensor as T
from synkhronos.extensions import loading, rules, session, train, updates


class Cells(HTMLParser):
    """The texts in the cells of a table."""

    def __init__(self, table):
        super().__init__()
        self.rows, self.open, self.title = [], [], ""
        self.feed(table)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "caption" in self.open:
            self.title += data
        elif self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data


def cells_of(shown):
    return Cells(shown._repr_html_()).rows


def test_the_names_that_are_shown_are_the_public_ones():
    assert dir(synk) == sorted([*synk.__all__, "__version__", "extensions", "ops"])
    assert all(hasattr(synk, name) for name in dir(synk))


@pytest.fixture(scope="module")
def shown(open_world):
    """A function, its shared variables and a `Data`."""
    open_world(2)
    x, scale = tt.dmatrix("x"), tt.dscalar("scale")
    w, rows = theano.shared(np.zeros(3), name="w"), theano.shared(np.ones((4, 3)), name="rows")
    outputs = [x.mean(), (x * scale, "gather"), (rows.sum(), "sum"), (w.sum(), None)]
    f = synk.function(
        [x], outputs, bcast_inputs=[scale], updates=[(w, w + 1, "sum")], sliceable_shareds=[rows],
        name="<f>", mode="FAST_COMPILE",
    )  # fmt: skip
    return f, synk.data(np.arange(60.0).reshape(20, 3), name="x")


def test_tables_escape_what_they_contain():
    table = Cells(_html.table("a < b", [("<i>", "one\ntwo", 3)], ["", "&", "c"]))
    assert table.title == "a < b"
    assert table.rows == [["", "&", "c"], ["<i>", "one\ntwo", "3"]]


def test_a_function_is_shown_with_its_inputs_outputs_and_updates(shown):
    f, _ = shown
    assert repr(f) == "<synkhronos.Function <f>>"
    assert Cells(f._repr_html_()).title == "Function <f>"
    assert cells_of(f) == [
        ["", "name", "type", "ranks"],
        ["input", "x", "float64, 2 dimensions", "split along axis 0"],
        ["input", "scale", "float64, 0 dimensions", "whole on every rank"],
        ["output", "0", "float64", "avg over the ranks"],
        ["output", "1", "float64", "gather along axis 0"],
        ["output", "2", "float64", "sum over the ranks"],
        ["output", "3", "float64", "the master's own"],
        ["update", "w", "", "on each rank, sum over slices"],
        ["sliceable", "rows", "", "each rank's own rows"],
    ]


def test_a_profile_is_shown_as_its_table(open_world):
    open_world(2)
    x = tt.dvector("x")
    f = synk.function([x], x.mean(), mode="FAST_COMPILE")
    with synk.profile() as measured:
        assert cells_of(measured) == [["", *measured.categories, "all"]]
        f(np.ones(4))
    assert repr(measured) == str(measured) == measured.table()
    header, *ranks = cells_of(measured)
    assert [row[0] for row in ranks] == ["rank 0", "rank 1"]
    for rank, row in enumerate(ranks):
        each = 1e3 * measured.seconds[0, rank]
        assert row[-1] == f"{each.sum():.3f}"
        assert row[header.index("wait")].startswith(f"{each[4]:.3f} (")
        assert sum(int(one.partition("(")[2].rstrip("%)")) for one in row[1:-1]) in range(97, 104)


CELLS = """
from prelude import *; world = open_world(2)
--
def act():
    return world.act(NOTHING, RAISE)
--
act()
--
world.f
--
synk.fork(2)
"""


@own_process
def test_in_ipython_an_error_of_a_worker_ends_with_one_line(tmp_path):
    pytest.importorskip("IPython")
    os.environ["IPYTHONDIR"] = str(tmp_path)
    from IPython.core.completer import provisionalcompleter
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("colors", "NoColor")
    printed = []
    for cell in CELLS.strip().split("\n--\n"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            shell.run_cell(cell)
        printed.append(out.getvalue())
    error = printed[2].strip().splitlines()
    assert error[0] == "Traceback of rank 1:"
    assert error[-1] == "WorkerError: rank 1 raised WorkerTrouble: it went wrong in here"
    ours = error[len(error) - error[::-1].index("Traceback (most recent call last):") :]
    assert "in <module>" in ours[0] and ours[1] == "    act()"  # the line in the cell is the first
    packages = os.path.dirname(synk.__file__) + os.sep, "IPython/"
    assert not [line for line in ours if any(one in line for one in packages)]
    assert len(ours) < 12
    assert printed[3].partition(": ")[2].strip() == "<synkhronos.Function f>"
    assert "fork(restart=True)" in printed[4]
    with provisionalcompleter():
        names = [one.text for one in shell.Completer.completions("synk.f", len("synk.f"))]
    assert {"fork", "function", "fuse"} <= {*names}
    assert {*names} <= {*dir(synk)}
    synk.close()


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
