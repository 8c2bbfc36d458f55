"""Tests of how a demo compares all processes with Theano untouched and with one process."""

import contextlib

import pytest
from demo_modules import modules_of

demo = modules_of("", "comparison", "script")


ALONE = """
import os

import synkhronos as synk

def alone(kind, text):
    assert (kind, text, synk.is_forked()) == ("theano", "a text", False)
    assert os.environ["SYNKHRONOS_KEEP_MEMORY"] == "0"
    print("this is no answer")
    return lambda: None
"""


def test_a_process_alone_prepares_works_in_turns_and_ends(demo, tmp_path):
    file = tmp_path / "prepared.py"
    file.write_text(ALONE)
    process = demo.comparison.Alone(file, "theano", "cpu", "a text")
    try:
        assert process.answer() >= 1  # BLAS threads
        assert all(0 <= process.turn() < 10 for _ in range(2))
    finally:
        process.end()
    assert process._process.poll() is not None


def test_a_process_that_cannot_prepare_is_one_line(demo, tmp_path, capfd):
    file = tmp_path / "broken.py"
    file.write_text("raise ValueError('broken')")
    process = demo.comparison.Alone(file, "theano", "cpu")
    try:
        with pytest.raises(demo.script.UserError, match=r"to compare with \(theano\) ended, see above"):
            process.answer()
    finally:
        process.end()
    assert "ValueError: broken" in capfd.readouterr().err


def test_the_faster_number_of_threads_is_chosen(demo, monkeypatch):
    limits = []

    class Limit(contextlib.nullcontext):
        def __init__(self, number, kind):
            super().__init__()
            limits.append(number)

    seconds = {1: 2.0, 4: 3.0}
    monkeypatch.setattr(demo.comparison, "blas_threads", lambda: 4)
    monkeypatch.setattr(demo.comparison, "threadpool_limits", Limit)
    monkeypatch.setattr(demo.comparison, "seconds_of", lambda work: seconds[limits[-1]])
    assert demo.comparison.choose_threads(lambda: None) == 1
    assert limits == [4, 1, 1]  # the last is how it stays
