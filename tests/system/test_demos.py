"""Tests of the demos: the numbered ones, those of a session, the notebook, and what they share."""

import importlib
import importlib.util
import os
import re

import pytest
from processes import own_process, ROOT

from synkhronos.host.compiler import NAME, TITLE
from demo_modules import modules_of, need
import notebooks

LINES = {
    1: {
        2: ["Rows that each process had, of 7:  [4 3]", "Rows at once, with num_slices=2:  [3 2 3 2]"],
        3: ["Rows that each process had, of 7:  [3 2 2]"],
    },
    2: {
        2: ["TypeError: Data: expected float32, got float64", "f(x_file, y_data) = -6.0"],
        3: ["f(x_data, y_data) = 27.5"],
    },
    3: {
        2: [
            "gather(s), by process: [[3.0, 3.0], [7.0, 7.0]]",
            "After all_reduce: [[10.0, 10.0], [10.0, 10.0]]",
            "Doubled on every process:       [[2.0, 2.0], [4.0, 4.0]]",
            "Their shapes: [(3, 2), (2, 2)]",
            "After all_gather every process has all rows:  [5, 5]",
        ],
        3: [
            "expected the same shape on every rank, got rank 0: (3, 2)",
            "every process has all rows:  [7, 7, 7]",
        ],
    },
    4: {
        2: ["batch=[7, 0, 0, -1]            rows [7, 0, 0, 9], loss 292.50"],
        3: ["IndexError: batch: row 10 is out of range for 10 rows"],
    },
    5: {
        2: ["f(batch_s=[:3, 3:, ...]):        [0.0, 2.0, 4.0, 14.0], mean 5"],
        3: ["Rows of each process: [4, 4, 4]"],
    },
}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("number", LINES)
def test_demo_shows_its_points(run_demo, number, n):
    done = run_demo(ROOT / "demos" / f"demo_{number}.py", *([] if n == 2 else ["--processes", str(n)]))
    assert not done.stderr
    assert done.stdout.startswith(f"Demo {number}: ")
    assert f"on {n} process(es)" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[-1].startswith(f"All results match plain {TITLE}")
    assert "Too small to be faster" in done.stdout.splitlines()[1]
    for line in LINES[number][n]:
        assert line in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("number", LINES)
def test_demo_runs_on_any_number_of_processes(run_demo, number, n):
    done = run_demo(ROOT / "demos" / f"demo_{number}.py", "-n", n)
    assert "All results match" in done.stdout


def test_the_demo_of_a_controller_tells_what_it_decides(run_demo):
    pytest.importorskip("sklearn")
    done = run_demo(ROOT / "demos" / "controller.py", "--epochs", 8, "--every", 60, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[0].endswith("processes: 2") and lines[2].split()[0] == "step"
    validations = [line for line in lines if re.match(r" *\d+  process [01] ", line)]
    assert validations[0].endswith("the best so far")
    steps, asked = re.search(r"Steps by process: (.*); questions: (\d+)", done.stdout).groups()
    steps = [int(number) for number in steps.split(", ")]
    assert max(steps) <= 8 * 30
    assert int(asked) == sum(steps) + len(validations) + 1  # and one at the end
    accuracy = re.search(r"accuracy ([0-9.]+)%, with the center of step (\d+)$", lines[-1])
    assert float(accuracy[1]) > 85
    assert any(line.split()[0] == accuracy[2] for line in validations)


def test_the_network_for_digits_equals_that_on_one_process(run_demo):
    pytest.importorskip("sklearn")
    done = run_demo(ROOT / "demos" / "digits_mlp.py", "--epochs", 4, "--batch", 20)
    lines = done.stdout.splitlines()
    assert lines[0] == f"Digits of 8x8 pixels, {TITLE}; processes: 2"
    assert lines[-1] == f"The loss of the first epoch matches plain {TITLE} on one process."
    assert float(re.search(r"^epoch 4: .* accuracy ([0-9.]+)%", done.stdout, re.MULTILINE)[1]) > 90


def test_the_keras_demo_equals_keras(run_demo, tmp_path):
    pytest.importorskip("sklearn")
    if NAME != "theano" or importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed: python -m synkhronos install keras")
    arguments = ["--processes", 2, "--epochs", 2, "--units", 8]
    done = run_demo(
        ROOT / "demos" / "keras_digits.py", *arguments, environment={"KERAS_HOME": str(tmp_path)}
    )
    assert done.stdout.splitlines()[-1].startswith("The history matches Keras on one process.")
    lines = done.stdout.splitlines()
    assert "Too small to be faster" in lines[0] and lines[1].startswith("epoch 1: loss ")


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


SESSION = ROOT / "demos" / "session" / "train.py"


def errors(stdout):
    table = stdout.rpartition("\n\n")[2].splitlines()
    assert table[0].split() == ["epoch", "seconds", "loss", "error", "error_top5"]
    return [float(line.split()[3]) for line in table[1:]]


@pytest.mark.parametrize(
    "model, options",
    [
        ("theano", ["--sync-type", "cdd", "--plot", "session.png", "--warmup", "1"]),
        pytest.param("lasagne", ["--rule", "EASGD", "--batch", "20"], marks=pytest.mark.slow),
        pytest.param("keras", ["--rule", "LocalSGD", "--scale-lr"], marks=pytest.mark.slow),
    ],
)
def test_a_model_of_each_library_learns_the_digits(run_demo, tmp_path, model, options):
    need("theano", "sklearn")
    if model != "theano" and importlib.util.find_spec(model) is None:
        pytest.skip(f"{model} is not installed")
    home = {"KERAS_HOME": str(tmp_path)}  # where Keras writes a file
    done = run_demo(
        SESSION, "--model", model, "--epochs", "5", *options, "--print-every", "30", environment=home
    )
    found = errors(done.stdout)
    assert len(found) == 5 and found[-1] < 0.2
    assert "time per 30 batches: " in done.stdout and "\nvalidation cost:" in done.stdout
    assert ("--plot" in options) == (tmp_path / "session.png").exists()


def test_wrong_options_of_a_session_end_with_one_line(run_demo):
    need("theano", "sklearn")
    for options, words in (
        (["--rule", "EASGD", "--sync-type", "cdd"], "nothing would be trained"),
        (["--sync-type", "cdd", "--scale-lr"], "which scales the step"),
    ):
        done = run_demo(SESSION, *options, check=False)
        assert words in done.stderr and len(done.stderr.splitlines()) == 1


PATH = ROOT / "demos" / "introduction.ipynb"


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("theano", "IPython"))),
    reason="the demos need Theano and IPython",
)
@own_process(timeout=120)
def test_its_outputs_are_those_of_its_cells(tmp_path):
    os.environ["IPYTHONDIR"] = str(tmp_path)
    notebook = notebooks.read(PATH)
    cells, stored = notebooks.code_cells(notebook), notebooks.stored(notebook)
    for _ in range(2):  # the cell that forks can be run again, before the last one has closed
        for cell, expected, got in zip(cells, stored, notebooks.run(notebook)):
            assert notebooks.without_times(cell, got) == notebooks.without_times(cell, expected)
        notebook["cells"] = notebook["cells"][:-1]


@pytest.mark.parametrize("path", sorted((ROOT / "demos").glob("*.ipynb")), ids=lambda path: path.stem)
def test_it_has_the_form_of_a_notebook(path):
    notebook = notebooks.read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    cells = notebooks.code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any("times" in cell["metadata"].get("tags", ()) for cell in cells)
    if path == PATH:
        assert sum("text/html" in str(cell["outputs"]) for cell in cells) >= 4
