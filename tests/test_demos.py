"""Tests that the numbered demos run with any number of processes, and print their main points."""

import importlib.util

import pytest
from conftest import ROOT

LINES = {
    1: {
        2: [
            "Rows that each process had, of 7:  [4 3]",
            "Rows at once, with num_slices=2:  [3 2 3 2]",
        ],
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
    assert done.stdout.splitlines()[-1].startswith("All results equal those of plain Theano")
    for line in LINES[number][n]:
        assert line in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("number", LINES)
def test_demo_runs_on_any_number_of_processes(run_demo, number, n):
    done = run_demo(ROOT / "demos" / f"demo_{number}.py", "-n", n)
    assert "All results equal" in done.stdout


def test_the_keras_demo_equals_keras(run_demo, tmp_path):
    pytest.importorskip("sklearn")
    if importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed: pip install keras==2.3.1")
    arguments = ["--processes", 2, "--epochs", 2, "--units", 8]
    done = run_demo(
        ROOT / "demos" / "keras_digits.py", *arguments, environment={"KERAS_HOME": str(tmp_path)}
    )
    assert done.stdout.splitlines()[-1].startswith("The history equals that of Keras on one process.")
    assert done.stdout.startswith("epoch 1: loss ")
