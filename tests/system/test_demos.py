"""Tests that the numbered demos run with any number of processes, and print their main points."""

import importlib
import importlib.util
import re

import pytest
from processes import ROOT

from synkhronos.host.compiler import NAME, TITLE

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
