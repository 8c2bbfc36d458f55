"""Tests of how a demo compares all processes with Theano untouched and with one process."""

import contextlib
import re

import pytest
from demo_modules import modules_of
from processes import ROOT

demo = modules_of("", "comparison", "script")


def times(demo, theano=3.0, one=1.5, others=0.0, cores=2):
    seconds = {"theano": theano, "one": one, "all": 1.0}
    return demo.comparison.Times(seconds, {"theano": 2, "one": 1, "all": 1}, 5, cores, others)


def test_both_comparisons_are_told_with_their_threads_and_what_others_used(demo):
    assert demo.comparison.describe(times(demo), 2, "100 digits") == [
        "2 processes are 3.00 times as fast as Theano untouched (2 BLAS threads),",
        "and 1.50 times as fast as the best setting of one process (1 BLAS thread)",
        "Seconds for 100 digits: 1.000, 3.000, 1.500; the least of 5 in turns",
        "Other programs used 0.0 of 2 cores meanwhile",
    ]


@pytest.mark.parametrize(
    "changed, processes, words",
    [
        ({"one": 1.2, "cores": 1}, 2, r"2 processes share 1 core\(s\)"),
        ({"theano": 1.1, "one": 1.4}, 2, "larger batches or networks gain more"),
    ],
)
def test_a_small_gain_is_explained_in_a_line_that_names_the_guide(demo, changed, processes, words):
    *_, last = demo.comparison.describe(times(demo, **changed), processes, "100 digits")
    path = last.rpartition("; see ")[2]
    assert last.startswith("Why not faster: ") and (ROOT / path).is_file()
    assert re.search(words, last)


def test_no_speedup_is_told_while_other_programs_use_the_cores(demo):
    first, *_ = lines = demo.comparison.describe(times(demo, theano=47.0, others=0.9), 2, "100 digits")
    assert first.startswith("not measured, as other programs") and "47.00" not in "".join(lines[:1])
    assert lines[-1] == "Other programs used 0.9 of 2 cores meanwhile"


def test_without_processes_for_one_on_a_gpu_there_is_one_comparison(demo):
    of_gpu = times(demo)._replace(seconds={"theano": 2.0, "all": 1.0})
    lines = demo.comparison.describe(of_gpu, 2, "100 digits")
    assert lines[0] == "2 processes are 2.00 times as fast as Theano untouched (2 BLAS threads)"
    assert lines[1].startswith("Seconds for 100 digits: 1.000, 2.000; ")


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


# What is shown while functions are compiled


def test_compiling_tells_the_number_of_the_function_and_its_seconds(demo, monkeypatch, capsys):
    monkeypatch.setenv("SYNKHRONOS_PROGRESS", "1")
    shown = []
    monkeypatch.setattr(
        demo.script.Progress, "_write", lambda self, work, remark, done: shown.append(work)
    )
    compiling = demo.script.Compiling(2)
    for name in ("the step", "the evaluation"):
        with compiling(name):
            pass
    assert shown == ["compiling 1 of 2, the step", "compiling 2 of 2, the evaluation"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(":")[0] for line in lines] == [
        "compiled 1 of 2, the step", "compiled 2 of 2, the evaluation"
    ]  # fmt: skip
    assert all(line.endswith(" s") for line in lines)


def test_nothing_is_told_if_progress_is_switched_off(demo, monkeypatch, capsys):
    monkeypatch.setenv("SYNKHRONOS_PROGRESS", "0")
    with demo.script.Compiling(1)("the step"):
        pass
    assert capsys.readouterr().err == ""
