"""Tests of how a demo compares all processes with Theano untouched and with one process."""

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
    process = demo.comparison.SerialRank(file, "theano", "cpu", "a text")
    try:
        assert process.answer() >= 1  # BLAS threads
        assert all(0 <= process.turn() < 10 for _ in range(2))
    finally:
        process.end()
    assert process._process.poll() is not None


def test_a_process_that_cannot_prepare_is_one_line(demo, tmp_path, capfd):
    file = tmp_path / "broken.py"
    file.write_text("raise ValueError('broken')")
    process = demo.comparison.SerialRank(file, "theano", "cpu")
    try:
        with pytest.raises(demo.script.UserError, match=r"to compare with \(theano\) ended, see above"):
            process.answer()
    finally:
        process.end()
    assert "ValueError: broken" in capfd.readouterr().err
