"""Tests of collectives in graphs, on this run's devices."""

from pathlib import Path

import numpy as np
import pytest
import theano.tensor as tt

import synkhronos as synk
from synkhronos.extensions import batch_norm, train

from . import graphs
from .graphs import collectives_of, on_all_ranks, shared

ops = synk.ops
PROGRAMS = Path(__file__).with_name("programs")
ROWS = np.random.RandomState(0).normal(size=(7, 3)).astype("float32")

pytestmark = pytest.mark.usefixtures("world")


def test_in_worlds_of_one_and_three_ranks(programs, devices, tmp_path):
    words = PROGRAMS / "run_module.py", "graphs", *devices[:1] * 3
    done = programs.run_script(*words, timeout=500, cwd=tmp_path)
    expected = [f"passed {one.__name__} on {n}" for n in (3, 1) for one in graphs.CHECKS]
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize("width", graphs.WIDTHS)
def test_collectives_of_arrays_on_the_device_stay_there(width):
    x, w = tt.fmatrix("x"), shared(np.linspace(0.5, 2, width))
    y = tt.tanh(x * w)
    outputs = [
        ops.all_reduce(y.sum(0)), ops.all_reduce(y.mean(0), "avg"), ops.all_reduce(y.max(0), "max"),
        ops.all_reduce(y[-1], "min"), ops.all_gather(y),
    ]  # fmt: skip
    f = synk.function([x], [on_all_ranks(one) for one in outputs])
    assert len(collectives_of(f)) == 5
    rows = np.random.RandomState(1).normal(size=(9, width)).astype("float32")
    for chosen in (rows, rows[:1]):  # of one row, most ranks have none
        values = np.tanh(chosen * w.get_value())
        lasts = [share[-1] for share in np.array_split(values, synk.size()) if len(share)]
        expected = [values.sum(0), values.mean(0), values.max(0), np.min(lasts, 0), values]
        for each, one in zip(f(chosen), expected):
            for result in each:
                np.testing.assert_allclose(result, one, rtol=1e-4, atol=1e-5)


def test_a_training_step_with_batch_norm_over_all_ranks_equals_the_serial_one():
    x = tt.fmatrix("x")

    def script():
        w, average, variance = shared([0.5, 1.0, -0.25]), shared(np.zeros(3)), shared(np.ones(3))
        out, _, _, *new = batch_norm.batch_normalization_train(
            tt.tanh(x * w), tt.ones_like(w), tt.zeros_like(w),
            running_mean=average, running_var=variance)  # fmt: skip
        loss = tt.sqr(out - x).mean()
        return loss, w, list(zip([average, variance], new))

    def descend(gradients, params):
        return [(param, param - np.float32(0.1) * g) for param, g in zip(params, gradients)]

    outcomes = []
    for make in (train.make_train_function, train.make_train_function_theano):
        loss, w, updates = script()
        step = make(loss, [w], x, None, descend, updates=updates)
        losses = [step(ROWS) for _ in range(3)]
        outcomes.append([losses, w.get_value(), *(target.get_value() for target, _ in updates)])
        if make is train.make_train_function:
            assert synk.in_sync([target for target, _ in updates])
    for result, expected in zip(*outcomes):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_slices_are_combined_over_all_ranks():
    x, average = tt.fmatrix("x"), shared(np.zeros(3))
    mean = ops.all_reduce((x + 0 * average).mean(0), "avg")
    f = synk.function([x], [mean], updates=[(average, mean)])
    np.testing.assert_allclose(f(ROWS, num_slices=3)[0], ROWS.mean(0), rtol=1e-4, atol=1e-6)
    assert synk.in_sync(average)
