"""Tests of programs whose ranks build models of their own: variables, functions, arrays and locks."""

import os
import signal
import time

import numpy as np
import pytest
from compilers import compiler, tt

import synkhronos as synk
from synkhronos._errors import SynkhronosError

RANKS = 3
# Of the master, or of the rank that was the first to raise it.
REFUSED = (TypeError, ValueError, RuntimeError, synk.WorkerError)
W = compiler.shared(np.zeros(2), "w")
OTHER = compiler.shared(np.zeros(2), "other")  # no function of synkhronos uses it


@pytest.fixture(scope="module")
def world(open_world):
    open_world(RANKS, timeout=60)
    x = tt.dvector("x")
    functions = {
        "known": synk.function([x], W.sum() + x.sum()),
        "own": compiler.function([x], W.sum() + x.sum(), updates=[(W, W + x)]),
        "private": compiler.function([x], OTHER.sum(), updates=[(OTHER, OTHER + x)]),
    }
    synk.distribute()
    return functions


@pytest.fixture
def functions(world):
    synk.broadcast(W, np.zeros(2))
    return world


def build(value):
    """Return the variables and the step of a model of this rank."""
    w, b = compiler.shared(np.full(2, float(value)), "w"), compiler.shared(np.float32(value), "b")
    x = tt.dvector("x")
    return [w, b], compiler.function([x], x.sum(), updates=[(w, w + x)])


def test_collectives_and_centers_take_variables_that_the_program_has_made(functions):
    def program(rank):
        (w, b), step = build(rank.rank)
        rank.adopt([w, b])
        rank.all_reduce(w, "sum")
        rank.broadcast(b)
        step(np.array([1.0, rank.rank]))
        gathered = rank.gather(w)
        center = rank.center(w)
        w.set_value(np.full(2, rank.rank))
        rank.barrier()
        center.update(lambda there, own: np.maximum(there, own, out=there))
        rank.barrier()
        return b.get_value(), gathered, center.value()

    for rank, (b, gathered, center) in enumerate(synk.spmd(program)):
        assert b == 0 and center.tolist() in [[4, 3], [4, 4], [4, 5]]  # of the rank that came first
        expected = None if rank else [[4, 3], [4, 4], [4, 5]]
        assert gathered is expected or gathered.tolist() == expected


def test_a_program_may_adopt_several_times_and_what_the_script_uses_already(functions):
    def program(rank):
        (w, b), _ = build(rank.rank)
        rank.adopt(w)
        rank.adopt([w, W, b])
        rank.all_reduce([b, W, w], "max")
        return float(b.get_value()), W.get_value().tolist(), w.get_value().tolist()

    assert synk.spmd(program) == [(2, [0, 0], [2, 2])] * RANKS


def test_after_the_program_its_variables_are_forgotten_and_keep_their_values(functions):
    kept = []

    def program(rank):
        (w, b), _ = build(rank.rank + 1)
        rank.adopt([w, b])
        rank.all_reduce(w, "sum")
        if rank.is_master:
            kept.append(w)
        return w.get_value().tolist()

    for _ in range(2):
        assert synk.spmd(program) == [[6, 6]] * RANKS
    with pytest.raises(REFUSED, match="is not used by any function"):
        synk.spmd(lambda rank: rank.all_reduce(kept[0]) if rank.is_master else rank.all_reduce(W))
    assert [one.get_value().tolist() for one in kept] == [[6, 6]] * 2


def test_variables_that_differ_between_ranks_are_refused_on_every_rank(functions):
    def program(rank, shape):
        w = compiler.shared(np.zeros(shape if rank.rank == 1 else 3), "w")
        try:
            rank.adopt(w)
        except ValueError as error:
            return str(error)

    synk.spmd(program, 3)
    for message in synk.spmd(program, 4):
        assert "rank 0: float64[3]; rank 1: float64[4]; rank 2: float64[3]; build the same" in message


def test_wrong_arguments_of_adopt_are_refused_in_words(functions):
    (w, _), _ = build(0)
    for wrong, error, words in (
        ([], ValueError, "at least one"),
        ([w, w], ValueError, "more than once"),
        (np.zeros(3), TypeError, "expected shared variables of tensors, got array"),
    ):
        with pytest.raises(error, match=words):
            synk.spmd(lambda rank, wrong=wrong: rank.is_master and rank.adopt(wrong))
    with pytest.raises(REFUSED, match=r"let every rank call rank\.adopt\(\) first"):
        synk.spmd(lambda rank: rank.all_reduce(build(0)[0]))


def test_a_rank_that_replaces_a_dead_one_adopts_again(functions):
    def program(rank):
        (w, _), step = build(0)
        rank.adopt(w)
        center = rank.center(w)
        for _ in range(20):
            step(np.ones(2))
            center.push()
            if rank.rank == 1 and not rank.restarts:
                os.kill(os.getpid(), signal.SIGKILL)
        return rank.restarts, len(center.value())

    results = synk.spmd(program, on_death="continue")
    assert results == [(0, 2), (1, 2), (0, 2)]
    assert synk.spmd(lambda rank: rank.all_reduce(W)) == [None] * RANKS


def test_a_function_that_the_script_compiled_uses_the_replicas_of_each_rank(functions):
    def program(rank):
        for _ in range(rank.rank):
            rank.call(functions["own"], [1.0, 2.0])
        functions["private"](np.ones(2))
        return float(rank.call(functions["known"], [0.0])), OTHER.get_value().tolist()

    results = synk.spmd(program)
    assert results == [(3.0 * rank, [1, 1]) for rank in range(RANKS)]
    assert synk.gather(W).tolist() == [[0, 0], [1, 2], [2, 4]]


def test_a_rank_calls_functions_about_whose_rows_nothing_is_known(functions):
    def program(rank):
        x, labels = tt.dmatrix("x"), tt.lvector("labels")
        f = compiler.function([x, labels], [x.sum(axis=0), labels, tt.neq(labels, 1).sum()])
        return [one.tolist() for one in rank.call(f, [[1.0, 2.0]], labels=[0, 1, rank.rank])]

    assert synk.spmd(program) == [[[1, 2], [0, 1, rank], 1 + (rank != 1)] for rank in range(RANKS)]
    words = "expected only inputs for .* which runs on the given rows alone"
    with pytest.raises(REFUSED, match=words):
        synk.spmd(lambda rank: rank.call(functions["own"], np.ones(2), batch=[0]))
    with pytest.raises(REFUSED, match="or a compiled function, got int"):
        synk.spmd(lambda rank: rank.call(3))


def test_a_graph_is_compiled_by_one_rank_and_loaded_by_the_others(functions, capfd):
    def program(rank, number):
        x = tt.dvector("x")
        with rank.compiling():
            began = time.monotonic()
            f = compiler.function([x], tt.tanh(x * number + x ** (number + 1)).sum())
            ended = time.monotonic()
        return float(f([1.0])), began, ended

    number = time.time() % 1  # new code each time
    values, began, ended = zip(*synk.spmd(program, number))
    assert len(set(values)) == 1
    assert min(began[1:]) >= ended[0], "the first rank compiles alone"
    assert "lock" not in capfd.readouterr().err


def test_an_error_in_the_block_of_compiling_ends_the_program(functions):
    def program(rank):
        with rank.compiling():
            raise KeyError("in the graph")

    with pytest.raises((KeyError, synk.WorkerError), match="in the graph"):
        synk.spmd(program)
    assert synk.spmd(lambda rank: rank.rank) == [0, 1, 2]


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
def test_arrays_are_reduced_like_shared_variables(functions, op):
    shapes = [(3,), (), (0, 2), (4, 5)]

    def program(rank, in_fortran):
        random = np.random.RandomState(rank.rank)
        arrays = [np.asarray(random.randint(1, 9, shape), "float32") for shape in shapes]
        given = [np.asfortranarray(one) if in_fortran else one for one in arrays]
        reduced = rank.all_reduce(given, op)
        again = rank.all_reduce(np.int64(rank.rank), "sum")
        return arrays, given, reduced, again

    for in_fortran in (False, True):
        results = synk.spmd(program, in_fortran)
        function = {"avg": "mean"}.get(op, op)
        for k, _ in enumerate(shapes):
            expected = getattr(np.array([one[0][k] for one in results]), function)(axis=0)
            for arrays, given, reduced, again in results:
                np.testing.assert_array_equal(given[k], arrays[k])
                np.testing.assert_allclose(reduced[k], expected, rtol=1e-6)
                assert reduced[k].dtype == "float32" and again == 3


def test_reduced_arrays_belong_to_their_rank(functions):
    def program(rank):
        first = rank.all_reduce(np.full(1000, float(rank.rank)), "sum")
        first += rank.rank
        second = rank.all_reduce(np.ones(1000), "sum")
        rank.barrier()
        return set(first), set(second)

    assert synk.spmd(program) == [({3.0 + rank}, {3.0}) for rank in range(RANKS)]


def test_weights_and_wrong_arrays(functions):
    def weighted(rank):
        return rank.all_reduce([float(rank.rank)], "avg", weight=rank.rank)

    assert [one[0] for one in synk.spmd(weighted)] == [pytest.approx(5 / 3)] * RANKS
    with pytest.raises(
        SynkhronosError, match=r"different collectives: rank 0: all_reduce\(sum, float64\[1"
    ):
        synk.spmd(lambda rank: rank.all_reduce(np.zeros(1 + rank.rank), "sum"))
    for wrong, words in (
        (lambda rank: rank.all_reduce([W, np.zeros(2)]), "expected shared variables of tensors"),
        (lambda rank: rank.all_reduce(np.array(["a"]), "sum"), "an array"),
        (lambda rank: rank.all_reduce(np.zeros(2), "sum", weight=2), "which is not an average"),
        (lambda rank: rank.all_reduce(np.zeros(2), wire="float16"), "expected None for arrays"),
    ):
        with pytest.raises(REFUSED, match=words):
            synk.spmd(wrong)


def test_one_rank_at_a_time_has_a_lock(functions, tmp_path):
    path = tmp_path / "count"
    path.write_text("0")

    def program(rank):
        for _ in range(20):
            with rank.lock():
                count = int(path.read_text())
                time.sleep(1e-4)
                path.write_text(str(count + 1))
        assert rank.lock() is rank.lock("lock")
        with rank.lock("a"), rank.lock("b"):
            pass

    synk.spmd(program)
    assert path.read_text() == str(20 * RANKS)


def test_a_lock_is_free_after_its_holder_has_died_or_ended(functions):
    def ending(rank):
        if rank.is_master:
            rank.lock().acquire()

    synk.spmd(ending)
    synk.spmd(ending)

    def freed(rank):
        lock = rank.lock()
        if rank.rank == 1 and not rank.restarts:
            lock.acquire()
            rank.clock = 1
            os.kill(os.getpid(), signal.SIGKILL)
        while not rank.clocks[1]:
            time.sleep(1e-3)
        with lock:
            return rank.restarts

    assert synk.spmd(freed, on_death="continue") == [0, 1, 0]


def test_wrong_uses_of_a_lock_are_refused(functions):
    def twice(rank):
        with rank.lock(), rank.lock():
            pass

    with pytest.raises(REFUSED, match="has the lock 'lock' already"):
        synk.spmd(twice)
    with pytest.raises(REFUSED, match="does not have the lock 'a'"):
        synk.spmd(lambda rank: rank.lock("a").release())
    with pytest.raises(REFUSED, match="rank.lock: name"):
        synk.spmd(lambda rank: rank.lock(3))
