"""Tests of sums over rows that are evaluated without Python, by workers that stay in a loop."""

import concurrent.futures
import multiprocessing
import os
import signal
import time

import numpy as np
import psutil
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from processes import own_process
from pytensor.compile.mode import get_mode
from pytensor.raise_op import Assert

import synkhronos as synk
from synkhronos.extensions.pymc import compiled, native, parallelize, rows_potential
from synkhronos.extensions.pymc.resident import read, write
from synkhronos.extensions.pymc.rows import Rows

ROWS = np.random.default_rng(0).normal(size=(1001, 3))


@pytest.fixture(scope="module")
def evaluated():
    """A function of a vector, with the sum and its gradient, that has been evaluated several times."""
    synk.fork(2)
    yield made()
    synk.close()


def made():
    w = pt.dvector("w")

    def log_prob(w, x):
        positive = Assert("a made-up error")(w, w[0] > 0)
        return -pt.sqr(pt.dot(x, positive))

    total = rows_potential(log_prob, [w], [ROWS], mode="NUMBA")
    return Evaluated([w], [total, pt.grad(total, w)], total.owner.op.rows)


class Evaluated:
    """A function that has been evaluated several times, and its rows."""

    def __init__(self, inputs, outputs, rows):
        self._function = pytensor.function(inputs, outputs, mode="FAST_COMPILE")
        self.rows = rows
        for number in range(4):  # the first ones are compared
            self(np.ones(3) + number)

    def __call__(self, *values):
        return self._function(*values)


def expected(w):
    products = ROWS @ w
    return -(products**2).sum(), -2 * products @ ROWS


def check(found, w):
    for one, other in zip(found, expected(w)):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def resident(evaluated):
    return evaluated.rows.resident[True]


def test_python_takes_no_part_but_other_commands_do(evaluated, monkeypatch):
    evaluated(np.ones(3))  # if a test before has had the workers leave
    record = resident(evaluated).record
    with monkeypatch.context() as patch:
        patch.setattr(Rows, "_evaluate_here", None)
        for choice in (native.TRY_RANKS, native.TRY_ALONE):
            write(record + native.CHOICE, choice)
            write(record + native.COUNT, 0)
            check(evaluated(np.full(3, 0.5)), np.full(3, 0.5))
    assert read(record + native.IS_ON)
    x = pt.dvector("x")
    double = synk.function([x], (2 * x, "gather"))
    np.testing.assert_array_equal(double(np.arange(4.0)), 2 * np.arange(4.0))
    assert not read(record + native.IS_ON)
    check(evaluated(np.ones(3)), np.ones(3))
    assert read(record + native.IS_ON)


def test_threads_take_turns(evaluated):
    write(resident(evaluated).record + native.CHOICE, native.TRY_RANKS)

    def evaluate(number):
        w = 1.0 + np.arange(3.0) * number
        for _ in range(100):
            value, *gradient = resident(evaluated).evaluate([w])
        check((value, gradient), w)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(evaluate, range(4)))


def test_an_error_on_the_ranks_is_raised_and_nothing_else_changes(evaluated):
    for choice in (native.TRY_RANKS, native.USE_ALONE):
        write(resident(evaluated).record + native.CHOICE, choice)
        with pytest.raises((AssertionError, synk.WorkerError), match="made-up"):
            evaluated(-np.ones(3))
        check(evaluated(np.ones(3)), np.ones(3))


def test_a_wait_for_a_stopped_rank_can_be_interrupted(evaluated):
    write(resident(evaluated).record + native.CHOICE, native.TRY_RANKS)
    write(resident(evaluated).record + native.COUNT, 0)
    [worker] = [psutil.Process(one.pid) for one in multiprocessing.active_children()]
    worker.suspend()
    while worker.status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            evaluated(np.full(3, 2.0))
    finally:
        signal.signal(signal.SIGALRM, before)
        worker.resume()
    for w in (np.full(3, 2.0), np.full(3, 3.0)):
        check(evaluated(w), w)


def test_a_fork_of_the_process_is_refused(evaluated):
    child = os.fork()
    if not child:
        try:
            evaluated(np.ones(3))
        except synk.SynkhronosError:
            os._exit(7)
        os._exit(0)
    assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 7
    check(evaluated(np.ones(3)), np.ones(3))


@own_process(timeout=300)
def test_a_dead_rank_is_noticed():
    synk.fork(2)
    evaluated = made()
    psutil.Process().children()[0].kill()
    began = time.monotonic()
    with pytest.raises(synk.WorldBrokenError, match="died"):
        for _ in range(100_000):
            write(evaluated.rows.resident[True].record + native.CHOICE, native.TRY_RANKS)
            evaluated(np.ones(3))
    assert time.monotonic() - began < 30
    with pytest.raises(synk.SynkhronosError):
        evaluated(np.ones(3))
    synk.close()


def choices(times):
    """Return the choices after evaluations that take these nanoseconds with ranks, and alone."""
    record = np.zeros(native.RECORD_BYTES // 8, np.int64)
    found = []
    for _ in range(400):
        choice = int(record[native.CHOICE // 8])
        alone = choice in (native.TRY_ALONE, native.USE_ALONE)
        native._choose(record.ctypes.data, times[alone])
        found.append(choice)
    return found, int(record[native.SAID // 8])


@pytest.mark.parametrize(
    "times, use, said",
    [((200_000, 400_000), native.USE_RANKS, 0), ((4_000_000, 400_000), native.USE_ALONE, 1)],
)
def test_what_takes_less_time_is_chosen(times, use, said):
    found, has_said = choices(times)
    assert found.count(use) > 350 and found[-1] == use
    assert has_said == said


def test_data_that_are_set_end_evaluations_without_python(evaluated):
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mean"), 1.0, observed=pm.Data("rows", np.arange(41.0)))
    parallel = parallelize(model, mode="NUMBA")
    compiled, plain = (one.compile_logp(mode="FAST_COMPILE") for one in (parallel, model))
    point = model.initial_point()
    for values in (np.arange(41.0), np.arange(41.0) / 2, np.arange(20.0)):
        pm.set_data({"rows": values}, model=model)
        for _ in range(12):  # the later ones without Python
            np.testing.assert_allclose(compiled(point), plain(point), rtol=1e-9)
        (rows,) = parallel.sums_over_rows()
        assert read(rows.resident[True].record + native.IS_ON)


def test_numba_knows_that_transposed_rows_are_contiguous():
    """Else it copies them in each evaluation."""
    matrix, vector = pt.dmatrix("matrix"), pt.dvector("vector")
    # A transpose for np.dot, a vector as a column, and a column as a vector
    product = pt.dot(matrix.T, pt.dot(matrix, vector) * 2)
    graphs = [product, vector[:, None] * matrix.T]
    mode = compiled.keeping_contiguous(get_mode("NUMBA"))
    function = pytensor.function([matrix, vector], graphs, mode=mode)
    left = [
        node.op for node in function.maker.fgraph.apply_nodes if type(node.op) is pt.elemwise.DimShuffle
    ]
    assert not any(op.input_ndim == 2 for op in left)
    rows, weights = ROWS[:4], np.arange(3.0)
    numbers = function(rows, weights)
    np.testing.assert_allclose(numbers[0], rows.T @ (rows @ weights * 2))
    np.testing.assert_array_equal(numbers[1], weights[:, None] * rows.T)
    assert compiled.keeping_contiguous(get_mode("CVM")) is get_mode("CVM")
