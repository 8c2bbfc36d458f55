"""Tests of what is shown while something takes long."""

import io
import os
import threading
import time

import numpy as np
import pytest
import theano.tensor as tt
from processes import own_process

import synkhronos as synk
from synkhronos.host import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stream(monkeypatch):
    """Function that replaces stderr by a stream of a class, and returns it; nothing is delayed."""
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")

    def replace(kind):
        made = kind()
        monkeypatch.setattr("sys.stderr", made)
        return made

    return replace


def wait_for(condition):
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_a_terminal_shows_a_line_that_moves_and_is_cleared(stream):
    terminal = stream(Terminal)
    with progress.Progress().show("compiling function 3 (train)"):
        wait_for(lambda: terminal.getvalue().count("\r") >= 3)
    *frames, last = terminal.getvalue().split("\r")
    assert last == "\x1b[2K"
    assert len({frame[4] for frame in frames[:3]}) == 3  # the spinner
    for frame in frames:
        assert frame.startswith("\x1b[2K")
        assert frame[5:].startswith(" synkhronos: compiling function 3 (train), 0 s")
    assert "\n" not in terminal.getvalue()


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_elsewhere_it_is_one_line_with_the_remark(stream, monkeypatch, kind):
    monkeypatch.setenv("TERM", "dumb")
    file = stream(kind)
    shown = progress.Progress()
    for number in (1, 2):  # the second is soon after the first
        with shown.show(f"compiling function {number}", "it takes minutes"):
            wait_for(file.getvalue)
            time.sleep(0.05)
    assert file.getvalue() == "synkhronos: compiling function 1; it takes minutes\n"


def test_work_that_ends_soon_shows_nothing(stream, monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 60.0)
    file = stream(io.StringIO)
    with progress.Progress().show("compiling"):
        pass
    assert file.getvalue() == ""


def test_work_inside_of_work_that_is_shown_is_not_shown(stream):
    file = stream(io.StringIO)
    with progress.Progress().show("outer"):
        wait_for(file.getvalue)
        before = threading.active_count()
        with progress.Progress().show("inner"):
            assert threading.active_count() == before
    assert file.getvalue() == "synkhronos: outer\n"


def test_it_can_be_switched_off(stream, monkeypatch):
    monkeypatch.setenv(progress.VARIABLE, "0")
    file = stream(io.StringIO)
    before = threading.active_count()
    with progress.Progress().show("compiling"):
        assert threading.active_count() == before
    assert file.getvalue() == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_no_thread_is_left_after_an_error(stream, error):
    stream(Terminal)
    before = threading.active_count()
    with pytest.raises(error):
        with progress.Progress().show("compiling"):
            assert threading.active_count() == before + 1
            raise error
    assert threading.active_count() == before


def test_a_closed_stderr_does_no_harm(stream):
    stream(io.StringIO).close()
    with progress.Progress().show("compiling"):
        time.sleep(0.05)


@own_process
def test_compiling_and_sending_functions_is_shown_with_their_number():
    shown = []
    os.environ.pop(progress.VARIABLE, None)
    progress.Progress._write = lambda self, work, remark, done: shown.append((work, remark))
    synk.fork(2, use_gpu=False)
    x = tt.dvector("x")
    for name in ("first", "second"):
        f = synk.function([x], (x.sum(), "sum"), name=name)
    assert f(np.arange(4.0)) == 6  # starts the workers
    assert threading.active_count() == 1
    late = synk.function([x], (x.max(), "max"), name="/folder/late.py:7")
    synk.distribute()
    assert late(np.arange(4.0)) == 3
    synk.close()
    assert [work for work, _ in shown] == [
        "compiling function 1 (first)",
        "compiling function 2 (second)",
        "compiling function 3 (late.py:7)",
        "sending 1 function(s) to 1 worker(s)",
    ]
    assert "taken from Theano's cache" in shown[0][1]
