"""Tests of sums over the rows of all ranks in graphs of PyTensor; PyMC is not needed for them."""

import contextlib
import ctypes
import gc
import importlib.util
import multiprocessing
import pickle
import threading
import time
import weakref

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import synkhronos as synk
from synkhronos.extensions.pymc import parallelize, rows_potential, serial
from synkhronos.functions import arguments

pytestmark = pytest.mark.usefixtures("in_python")
random = np.random.default_rng(5)
NUMBERS, COUNTS, GROUP = random.normal(size=41), random.poisson(3, 41), random.integers(0, 4, 41)


def total_of_numbers(**options):
    mean = pt.dscalar("mean")
    total = rows_potential(lambda mean, row: -pt.sqr(row - mean), [mean], [NUMBERS], **options)
    return pytensor.function([mean], total)


def test_a_graph_with_variables_for_the_rows_may_be_given(two):
    mean, row, which = pt.dvector("mean"), pt.dvector("row"), pt.lvector("which")
    total = rows_potential(-pt.sqr(row - mean[which]).sum(), [mean], {row: NUMBERS, which: GROUP})
    for size in (4, 6):  # the shape of a parameter may change
        point = np.arange(float(size))
        np.testing.assert_allclose(total.eval({mean: point}), -np.sum((NUMBERS - point[GROUP]) ** 2))


def test_the_gradient_is_that_of_the_sum(two):
    mean, which = pt.dvector("mean"), pt.lscalar("which")
    total = rows_potential(
        lambda mean, which, row: -pt.sqr(row - mean[which]), [mean, which], [NUMBERS], mode="CVM"
    )
    compiled = pytensor.function([mean, which], [total, pt.grad(total * 2, mean)])
    value, gradient = compiled(np.array([0.5, 2.0]), 1)
    np.testing.assert_allclose(value, -np.sum((NUMBERS - 2) ** 2))
    np.testing.assert_allclose(gradient, [0, 4 * np.sum(NUMBERS - 2)])
    with pytest.raises(NotImplementedError, match="there is no Hessian"):
        pt.grad(pt.grad(total, mean).sum(), mean)


@pytest.mark.parametrize("bytes_at_once, slices", [(40, 4), (1, 164)])
def test_many_rows_are_summed_in_slices(two, monkeypatch, bytes_at_once, slices):
    monkeypatch.setattr("synkhronos.extensions.pymc.rows._SLICE", bytes_at_once)
    asked, compile_call = [], arguments.compile_call

    def counted(*args):
        asked.append(args[-1])
        return compile_call(*args)

    monkeypatch.setattr(arguments, "compile_call", counted)
    mean = pt.dscalar("mean")
    total = rows_potential(lambda mean, row: -pt.sqr(row - mean), [mean], [NUMBERS])
    value, gradient = pytensor.function([mean], [total, pt.grad(total, mean)])(0.5)
    np.testing.assert_allclose(value, -np.sum((NUMBERS - 0.5) ** 2))
    np.testing.assert_allclose(gradient, 2 * np.sum(NUMBERS - 0.5))
    assert asked == [slices]


@pytest.mark.parametrize("mode, with_gradient", [("CVM", False), ("FAST_COMPILE", True)])
def test_without_a_use_for_the_gradient_compilation_leaves_it_out(two, mode, with_gradient):
    mean = pt.dscalar("mean")
    total = rows_potential(lambda mean, row: row * mean, [mean], [NUMBERS])
    compiled = pytensor.function([mean], total, mode=mode)
    assert [node.op.with_gradient for node in compiled.maker.fgraph.toposort()] == [with_gradient]
    np.testing.assert_allclose(compiled(2.0), 2 * NUMBERS.sum())


def test_arguments_of_the_wrong_kind_are_named(two):
    mean, row = pt.dscalar("mean"), pt.dvector("row")
    term, masked = -pt.sqr(row - mean), np.ma.masked_equal([1, 2.0], 2)
    for error, words, *given in (
        (TypeError, r"inputs\[0\]: expected a tensor variable", term, [2.0], {row: NUMBERS}),
        (TypeError, "data: expected a dictionary", term, [mean], [NUMBERS]),
        (TypeError, r"data\[0\]: expected an array of numbers with rows", lambda m, y: m, [mean], [3.0]),
        (TypeError, "expected that it returns a variable", lambda m, y: 1.0, [mean], [NUMBERS]),
        (TypeError, "expected dtype float64 and 1 dim", term, [mean], {row: synk.data(COUNTS)}),
        (ValueError, "draws random numbers", term + pt.random.normal(0, 1), [mean], {row: NUMBERS}),
        (ValueError, r"equal numbers of rows, got data\[0\]: 41, data\[1\]: 40",
         lambda m, a, b: a * m, [mean], [NUMBERS, COUNTS[1:]]),
        (ValueError, r"^rows_potential: data: data\[0\]: 1 value\(s\) are masked",
         lambda m, y: -((y - m) ** 2), [mean], [masked]),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            rows_potential(*given)


def test_it_cannot_be_pickled(two):
    mean = pt.dscalar("mean")
    total = rows_potential(lambda mean, row: row * mean, [mean], [NUMBERS])
    with pytest.raises(pickle.PicklingError, match=r"pm.sample\(cores=1\)"):
        pickle.dumps(total.owner.op)


@pytest.mark.skipif(importlib.util.find_spec("pymc") is not None, reason="PyMC is installed")
def test_without_pymc_it_is_named():
    with pytest.raises(ImportError, match="parallelize: PyMC is not installed: python -m pip"):
        parallelize(None)


def test_an_evaluation_in_a_forked_process_is_an_error_there(two):
    compiled = total_of_numbers()
    compiled(1.0)

    def evaluate(connection):
        try:
            compiled(2.0)
        except synk.SynkhronosError as error:
            connection.send(str(error))

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=evaluate, args=(theirs,))
    process.start()
    assert ours.poll(60) and "was forked from the one that has the ranks" in ours.recv()
    process.join()
    np.testing.assert_allclose(compiled(1.0), -np.sum((NUMBERS - 1) ** 2))


def test_a_second_thread_waits_while_one_evaluates(two):
    mean = pt.dscalar("mean")
    total = rows_potential(lambda mean, row: row * mean, [mean], [NUMBERS])
    compiled, values = pytensor.function([mean], total), []
    compiled(1.0)
    threads = [
        threading.Thread(target=lambda number=number: values.append((number, compiled(float(number)))))
        for number in range(4)
    ]
    with total.owner.op.rows.turn:
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        assert not values
    for thread in threads:
        thread.join()
    for number, value in values:  # each gets the value for its own parameters
        np.testing.assert_allclose(value, number * NUMBERS.sum())


def test_a_signal_handler_is_refused_during_an_evaluation(two):
    mean = pt.dscalar("mean")
    total = rows_potential(lambda mean, row: row * mean, [mean], [NUMBERS])
    compiled = pytensor.function([mean], total)
    compiled(1.0)
    with total.owner.op.rows.turn, pytest.raises(synk.SynkhronosError, match="from a signal handler"):
        compiled(1.0)


def call_in_foreign_thread(function, began):
    """Call a function in a thread that Python did not start, and lose its errors; note the thread."""

    def call(_):
        try:
            function()
        except Exception:
            lost.append(True)

    lost, thread = [], ctypes.c_ulong()
    callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(call)
    began.append((thread, callback, lost))
    ctypes.CDLL(None).pthread_create(ctypes.byref(thread), None, callback, None)


def joined(thread, callback, lost):
    ctypes.CDLL(None).pthread_join(thread, None)
    return lost


@pytest.mark.parametrize("waits_in_python", [False, True])
def test_an_error_in_a_thread_of_a_sampler_is_raised_in_the_main_thread(two, waits_in_python, caplog):
    compiled = total_of_numbers(name="numbers")
    began = []
    call_in_foreign_thread(lambda: compiled(1.0), began)
    assert joined(*began[0]) == []
    synk.close()
    began = []
    with pytest.raises(synk.ClosedError, match="numbers: its processes were closed") as caught:
        try:
            # A signal that comes just before a wait does not end it; samplers wait again and again.
            call_in_foreign_thread(lambda: time.sleep(0.2) or evaluate_in_vain(compiled), began)
            if waits_in_python:
                while True:
                    pass
            time.sleep(60)
        except KeyboardInterrupt:  # as a sampler that ends its threads
            joined(*began[0])
            for _ in range(1000):
                pass
    assert isinstance(caught.value.__cause__, synk.ClosedError)
    assert began[0][-1] == [True]
    end = time.monotonic() + 10
    while not caplog.text and time.monotonic() < end:  # a thread of its own writes it
        time.sleep(0.01)
    time.sleep(0.1)  # nothing comes later
    assert caplog.text.count("an evaluation failed in a thread of the sampler") == 1


def evaluate_in_vain(compiled):
    """Evaluate as nutpie does: to it, errors are divergences, and it goes on."""
    for _ in range(3):
        with contextlib.suppress(synk.ClosedError):
            compiled(1.0)
    compiled(1.0)


def test_an_error_in_a_thread_of_python_is_raised_there_only(two, caplog):
    compiled, errors = total_of_numbers(), []
    synk.close()

    def evaluate():
        try:
            compiled(1.0)
        except synk.ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join()
    assert len(errors) == 1 and not caplog.text


def test_what_is_no_sum_over_the_rows_is_an_error_each_time_it_is_evaluated(two):
    mean = pt.dscalar("mean")
    total = rows_potential(lambda mean, row: -pt.sqr(row - mean).mean(), [mean], [NUMBERS])
    compiled = pytensor.function([mean], total)
    for _ in range(2):
        with pytest.raises(ValueError, match="is not a sum over the rows: of 41 rows it is"):
            compiled(1.0)


def test_the_rows_are_tested_where_the_value_is_finite(two):
    mean, row = pt.dscalar("mean"), pt.dvector("row")
    term = pt.switch(mean > 0, -pt.sqr(row - row.mean() - mean), -np.inf)
    compiled = pytensor.function([mean], rows_potential(term, [mean], {row: NUMBERS}))
    assert compiled(-1.0) == -np.inf
    with pytest.raises(ValueError, match="is not a sum over the rows"):
        compiled(1.0)


def test_terms_that_cancel_each_other_are_a_sum(two):
    mean, row = pt.dscalar("mean"), pt.dvector("row")
    rows = np.concatenate([NUMBERS * 1e8, -NUMBERS * 1e8, [1e-9]])
    total = rows_potential(mean * row, [mean], {row: np.random.default_rng(0).permutation(rows)})
    compiled = pytensor.function([mean], [total, pt.grad(total, mean)])
    for value in (1.0, 2.0, -3.0, 4.0):
        np.testing.assert_allclose(compiled(value), 0, atol=1e-5)


def test_the_first_evaluations_are_compared_with_one_process(two, monkeypatch):
    tolerance, asked, of_evaluations = serial.tolerance, [], 0.0

    def least(dtype, dtypes):
        if len(dtypes) == 1:  # of the parameter: a test whether the rows are independent
            return tolerance(dtype, dtypes)
        asked.append(dtypes)
        return tolerance(dtype, dtypes) + of_evaluations

    monkeypatch.setattr(serial, "tolerance", least)
    monkeypatch.setattr("synkhronos.extensions.pymc.serial._CHUNK", 100)
    compiled = total_of_numbers()
    for _ in range(5):
        compiled(1.0)
    assert len(asked) == 3
    compiled = total_of_numbers(name="numbers")
    of_evaluations = -1.0
    for _ in range(2):
        with pytest.raises(synk.MismatchError, match="numbers: the log-prob.* by 2 rank"):
            compiled(1.0)


def test_the_rows_are_freed_with_the_last_graph_or_function(two):
    mean, row = pt.dscalar("mean"), pt.dvector("row")
    total = rows_potential(mean * row, [mean], {row: NUMBERS})
    rows, op = weakref.ref(total.owner.op.rows), total.owner.op
    compiled = pytensor.function([mean], [total, pt.grad(total, mean)])
    by_numba = pytensor.function([mean], pt.exp(total / 100) * mean, mode="NUMBA")
    del total
    gc.collect()
    np.testing.assert_allclose(compiled(2.0), [2 * NUMBERS.sum(), NUMBERS.sum()])
    np.testing.assert_allclose(by_numba(2.0), np.exp(NUMBERS.sum() / 50) * 2)
    del compiled
    by_numba = by_numba.copy()
    gc.collect()
    np.testing.assert_allclose(by_numba(1.0), np.exp(NUMBERS.sum() / 100))
    del by_numba
    gc.collect()
    assert rows() is None
    with pytest.raises(synk.SynkhronosError, match="its rows were freed"):
        op(mean)


def test_inside_a_fused_block_it_is_refused(two):
    compiled = total_of_numbers()
    compiled(1.0)
    with pytest.raises(RuntimeError, match="inside a fuse"), synk.fuse():
        compiled(1.0)


def test_it_needs_pytensor_and_imports_pymc_only_when_it_is_used(run_python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nimport synkhronos.extensions.pymc\nprint('pymc' in sys.modules)")
    assert run_python(script).stdout.split() == ["False"]
