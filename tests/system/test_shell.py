"""Tests of what IPython, Jupyter and ``help`` show: names, objects and errors."""

import contextlib
import io
import os
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import theano
import theano.tensor as tt
from processes import own_process

import synkhronos as synk
from synkhronos import _html


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


@own_process
def test_extensions_are_imported_when_they_are_used():
    assert "synkhronos.extensions.updates" not in sys.modules
    assert dir(synk.extensions) == [
        "batch_norm", "loading", "rules", "session", "train", "updates", "zoo",
    ]  # fmt: skip
    with pytest.raises(ImportError, match="builds graphs of PyTensor, and Theano is used"):
        synk.extensions.pymc  # noqa: B018
    assert callable(synk.extensions.updates.sgd)
    assert "synkhronos.extensions.train" not in sys.modules
    assert callable(synk.extensions.train.make_train_function)
    assert not {"keras", "lasagne"} & {*sys.modules}
    with pytest.raises(AttributeError, match="no attribute 'rule'"):
        synk.extensions.__getattr__("rule")
    sys.modules["keras"] = None  # as if it were not installed
    with pytest.raises(ImportError, match="synkhronos install keras"):
        synk.extensions.__getattr__("keras")


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
