"""Tests of sums over the rows of all ranks in graphs of PyTensor; PyMC is not needed for them."""

import contextlib
import importlib.util
import multiprocessing
import pickle
import threading

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import synkhronos as synk
from synkhronos.extensions.pymc import parallelize, rows_potential
from synkhronos.functions import arguments

random = np.random.default_rng(5)
NUMBERS, COUNTS, GROUP = random.normal(size=41), random.poisson(3, 41), random.integers(0, 4, 41)


@pytest.fixture
def two(world_of, in_python):
    world_of(2)


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
    asked, plan = [], arguments.plan

    def counted(*args):
        asked.append(args[-1])
        return plan(*args)

    monkeypatch.setattr(arguments, "plan", counted)
    mean = pt.dscalar("mean")
    total = rows_potential(lambda mean, row: -pt.sqr(row - mean), [mean], [NUMBERS])
    value, gradient = pytensor.function([mean], [total, pt.grad(total, mean)])(0.5)
    np.testing.assert_allclose(value, -np.sum((NUMBERS - 0.5) ** 2))
    np.testing.assert_allclose(gradient, 2 * np.sum(NUMBERS - 0.5))
    assert asked == [slices]


def test_what_is_no_sum_over_the_rows_is_an_error_when_it_is_evaluated(two):
    mean = pt.dscalar("mean")
    total = rows_potential(lambda mean, row: -pt.sqr(row - mean).mean(), [mean], [NUMBERS])
    with pytest.raises(ValueError, match="is not a sum over the rows: of 41 rows it is"):
        total.eval({mean: 1.0})


@pytest.mark.parametrize("mode, operation", [("CVM", "RowsValue"), ("FAST_COMPILE", "RowsSum")])
def test_without_a_use_for_the_gradient_compilation_leaves_it_out(two, mode, operation):
    mean = pt.dscalar("mean")
    total = rows_potential(lambda mean, row: row * mean, [mean], [NUMBERS])
    compiled = pytensor.function([mean], total, mode=mode)
    assert [type(node.op).__name__ for node in compiled.maker.fgraph.toposort()] == [operation]
    np.testing.assert_allclose(compiled(2.0), 2 * NUMBERS.sum())


def test_it_is_evaluated_by_code_of_numba(two):
    mean = pt.dscalar("mean")
    total = rows_potential(lambda mean, row: row * mean, [mean], [NUMBERS])
    compiled = pytensor.function([mean], [total + 1, pt.grad(total, mean)], mode="NUMBA")
    np.testing.assert_allclose(compiled(2.0), [2 * NUMBERS.sum() + 1, NUMBERS.sum()])


def test_arguments_of_the_wrong_kind_are_named(two):
    mean, row = pt.dscalar("mean"), pt.dvector("row")
    term = -pt.sqr(row - mean)
    with pytest.raises(TypeError, match=r"inputs\[0\]: expected a tensor variable"):
        rows_potential(term, [2.0], {row: NUMBERS})
    with pytest.raises(TypeError, match="data: expected a dictionary"):
        rows_potential(term, [mean], [NUMBERS])
    with pytest.raises(TypeError, match=r"data\[0\]: expected an array of numbers with rows"):
        rows_potential(lambda mean, row: mean, [mean], [3.0])
    with pytest.raises(TypeError, match="expected that it returns a variable"):
        rows_potential(lambda mean, row: 1.0, [mean], [NUMBERS])
    with pytest.raises(TypeError, match="expected dtype float64 and 1 dimension"):
        rows_potential(term, [mean], {row: synk.data(COUNTS)})
    with pytest.raises(ValueError, match="draws random numbers"):
        rows_potential(term + pt.random.normal(0, 1), [mean], {row: NUMBERS})
    with pytest.raises(ValueError, match=r"equal numbers of rows, got data\[0\]: 41, data\[1\]: 40"):
        rows_potential(lambda mean, a, b: a * mean, [mean], [NUMBERS, COUNTS[1:]])


def test_after_its_processes_were_closed_it_says_what_to_do(two):
    compiled = total_of_numbers()
    compiled(1.0)
    synk.close()
    with pytest.raises(synk.ClosedError, match=r"its processes were closed; .*rows_potential\(\) again"):
        compiled(1.0)


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


def test_a_second_thread_is_refused_while_one_evaluates(two):
    mean = pt.dscalar("mean")
    total = rows_potential(lambda mean, row: row * mean, [mean], [NUMBERS])
    compiled, errors = pytensor.function([mean], total), []
    compiled(1.0)

    def evaluate():
        try:
            compiled(1.0)
        except synk.SynkhronosError as error:
            errors.append(str(error))

    for expected in (1, 1):
        with total.owner.op.rows.turn if not errors else contextlib.nullcontext():
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()
        assert len(errors) == expected and "one thread at a time" in errors[0]


def test_inside_a_fused_block_it_is_refused(two):
    compiled = total_of_numbers()
    compiled(1.0)
    with pytest.raises(RuntimeError, match="inside a fuse"), synk.fuse():
        compiled(1.0)


def test_it_needs_pytensor_and_imports_pymc_only_when_it_is_used(run_python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nimport synkhronos.extensions.pymc\nprint('pymc' in sys.modules)")
    assert run_python(script).stdout.split() == ["False"]
