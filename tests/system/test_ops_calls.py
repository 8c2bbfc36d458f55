"""Tests of calls of functions with collectives: ranks without rows, slices, failures, programs."""

import multiprocessing


import numpy as np
import pytest
from compilers import Apply, Op, Streams, as_op, compiler, tt
from prelude import error_of
from processes import own_process

import synkhronos as synk
from synkhronos.functions.peers import GraphPeers
from synkhronos.world.world import current_world

ops = synk.ops
RANKS = 3
ROWS = np.random.RandomState(0).normal(size=(8, 2))


@pytest.fixture
def world(open_world, in_python):
    """Three ranks, with the master in the middle."""
    if not synk.is_forked() or not usable():
        open_world(RANKS, master_rank=1)
        synk.distribute()


def usable():
    """Whether the world that another test has left is like that of `world`."""
    found = current_world()
    return (found.size, found.master_rank, found.broken) == (RANKS, 1, None)


class Raise(Op):
    """Returns its input, or raises an error on the rank whose row has a NaN."""

    __props__ = ()

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        if np.isnan(inputs[0]).any():
            raise LookupError("a NaN was found")
        outputs[0][0] = inputs[0]

    def infer_shape(self, node, shapes):
        return shapes


def statistics():
    """Return the inputs, outputs and updates of a function that is defined on no rows, too."""
    x, count = tt.dmatrix("x"), compiler.shared(0, "count")
    average, own = (compiler.shared(np.zeros(2), name) for name in ("average", "own"))
    mean = ops.all_reduce(x.mean(0), "avg")
    outputs = [
        tt.sqr(x - mean).mean(),
        (ops.all_reduce(x.sum(0)), None),
        (ops.all_gather(x), None),
        (ops.all_reduce(tt.minimum(x.sum(0), 0.5), "min"), None),
    ]
    updates = [
        (average, 0.5 * average + 0.5 * mean),
        (count, count + 1, None),
        (own, own + x.sum(0), "sum"),
    ]
    return x, outputs, updates


@pytest.mark.parametrize("n_rows", [8, 3, 2, 1])
def test_ranks_without_rows_take_part_and_count_nowhere(world, n_rows):
    x, outputs, updates = statistics()
    f = synk.function([x], outputs, updates=updates)
    average, count, own = (target for target, *_ in updates)
    rows = ROWS[:n_rows] + 2
    if n_rows > 1:
        results, alone = f(rows), synk.function([x], outputs).as_theano(rows)
        for result, expected in zip(results[:3], alone):
            np.testing.assert_allclose(result, expected)
        least = min(np.minimum(one.sum(0), 0.5).min() for one in np.array_split(rows, RANKS) if len(one))
        assert results[3].min() == least
    else:  # the master is rank 1, so it has no rows either
        with pytest.raises(ValueError, match="the master, gets none"):
            f(rows)
        f(rows, output_subset=[0])
    counts = [1] * RANKS
    assert synk.gather(count).tolist() == counts
    by_rank = synk.gather(average)
    np.testing.assert_allclose(by_rank, [rows.mean(0) / 2] * RANKS)
    sums = [share.sum(0) for share in np.array_split(rows, RANKS)]
    np.testing.assert_allclose(synk.gather(own), sums)


def test_the_value_of_a_master_without_rows_is_refused_before_anything_starts(world):
    x = tt.dmatrix("x")
    f = synk.function([x], ((x - ops.broadcast(x[0])).mean(), "avg"))
    for rows, slices in ((ROWS[:1], 1), (ROWS[:4], 2)):
        with pytest.raises(ValueError, match=r"the master's value \(synk.ops.broadcast\)"):
            f(rows, num_slices=slices)
    np.testing.assert_allclose(f(ROWS[:6], num_slices=2).shape, ())


def test_what_cannot_be_computed_of_no_rows_is_computed_by_ranks_without_rows(world):
    x, largest = tt.dmatrix("x"), compiler.shared(np.zeros(2), "largest")
    f = synk.function([x], updates=[(largest, ops.all_reduce((-x).max(0), "max"))])
    for rows in (ROWS, ROWS[:2], np.ones((1, 2))):
        for batch in (None, np.arange(len(rows))[::-1]):
            f(rows, batch=batch)
            np.testing.assert_allclose(synk.gather(largest), [(-rows).max(0)] * RANKS)
    own = compiler.shared(np.zeros((2, 2)), "rows")
    updates = [(largest, ops.all_reduce(own.max(0), "max"))]
    f = synk.function([], updates=updates, sliceable_shareds=[own])
    synk.scatter(own, ROWS)
    f(batch_s=[slice(0, 0), slice(0, 2), slice(1, 1)])
    np.testing.assert_allclose(synk.gather(largest), [ROWS[3:5].max(0)] * RANKS)
    with pytest.raises(ValueError, match="no rank has rows"):
        f(batch_s=slice(0, 0))


def test_rows_of_sliceable_variables_and_windows_are_reduced(world):
    rows = compiler.shared(ROWS.copy(), name="rows")
    f = synk.function([], (ops.all_reduce(rows.mean(0), "avg"), None), sliceable_shareds=[rows])
    synk.scatter(rows, ROWS)
    np.testing.assert_allclose(f(), ROWS.mean(0))
    np.testing.assert_allclose(f(batch_s=slice(0, 2)), ROWS[[0, 1, 3, 4, 6, 7]].mean(0))
    index, x = tt.lscalar("index"), tt.dmatrix("x")
    data = compiler.shared(ROWS)
    f = synk.function([index], ops.all_reduce(x.sum(0)), givens={x: data[index * 5 : (index + 1) * 5]})
    for number in range(2):
        np.testing.assert_allclose(f(number), ROWS[number * 5 : number * 5 + 5].sum(0))


def test_check_compares_with_the_function_alone_and_audits_know_what_is_joint(open_world, in_python):
    open_world(RANKS, check=True)
    x, outputs, updates = statistics()
    f = synk.function([x], [*outputs[:1], (outputs[1][0], "avg")], updates=updates[:2])
    compared = f.check(ROWS)
    assert set(compared.differences) == {"output 0", "output 1", "shared variable average",
                                         "shared variable count"}  # fmt: skip
    for _ in range(3):
        f(ROWS)
    (average, *_), (count, *_) = updates[:2]
    average.container.storage[0] = np.ones(2)  # on one rank, which nothing notices
    with pytest.raises(synk.MismatchError, match="after this call the replicas of average differ"):
        f(ROWS)
    synk.close()


def test_what_only_collectives_use_may_differ_and_gives_no_warning(world, recwarn):
    """The ranks' values are combined in the graph, as by synk.all_reduce."""
    x, w = tt.dmatrix("x"), compiler.shared(np.zeros(2), "w")
    f = synk.function([x], updates=[(w, w + x.mean(0))])
    combine = synk.function([x], x.mean(), updates=[(w, ops.all_reduce(w, "avg"))])
    for _ in range(70):
        f(ROWS)
        combine(ROWS)
    assert synk.in_sync(w)
    assert not [one for one in recwarn.list if issubclass(one.category, synk.SynkhronosWarning)]


def test_random_streams_and_checkpoints_work_with_collectives(world, tmp_path):
    x, stream = tt.dmatrix("x"), Streams(3)
    average = compiler.shared(np.zeros(2), "average")
    noisy = x + stream.normal(x.shape)
    mean = ops.all_reduce(noisy.mean(0), "avg")
    f = synk.function([x], [(mean, None), (noisy, "gather")], updates=[(average, mean)])
    f(ROWS)
    means, noises = f(ROWS)
    np.testing.assert_allclose(means, noises.mean(0))
    assert synk.in_sync(average)
    synk.save(tmp_path / "state")
    expected = f(ROWS)
    synk.load(tmp_path / "state")
    for result, one in zip(f(ROWS), expected):
        np.testing.assert_array_equal(result, one)


@pytest.mark.parametrize("position", ["before", "between", "after"])
@pytest.mark.parametrize("failing", range(RANKS))
def test_nobody_waits_for_a_rank_that_fails(world, position, failing):
    x = tt.dmatrix("x")
    first = ops.all_reduce((Raise()(x) if position == "before" else x).sum(0))
    second = ops.all_reduce((Raise()(x) if position == "between" else x).mean(0) * first)
    last = (Raise()(x) if position == "after" else x) * second
    f = synk.function([x], last.mean())
    rows = ROWS.copy()
    rows[np.array_split(np.arange(len(ROWS)), RANKS)[failing][0]] = np.nan
    error = error_of(lambda: f(rows), 20)
    if failing == 1:
        assert type(error) is LookupError, repr(error)
    else:
        assert type(error) is synk.WorkerError and error.rank == failing
        assert error.type_name == "LookupError" and "a NaN was found" in error.message
    assert np.isfinite(f(ROWS))


@own_process
def test_a_rank_that_is_killed_inside_a_graph_breaks_the_world_and_restart_recovers_it():
    synk.fork(2, use_gpu=False, verify="off")  # otherwise the master would compute the fatal row, too
    x = tt.dmatrix("x")

    @as_op(itypes=[tt.dvector], otypes=[tt.dvector])
    def die(one):
        import os
        import signal

        if np.isnan(one).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return one.copy()

    f = synk.function([x], ops.all_reduce(die(x.sum(0))).sum())
    rows = ROWS.copy()
    rows[-1] = np.nan
    error = error_of(lambda: f(rows))
    assert type(error) is synk.WorldBrokenError and "rank 1" in str(error), repr(error)
    synk.restart()
    np.testing.assert_allclose(f(ROWS), ROWS.sum())
    assert len(multiprocessing.active_children()) == 1


def test_ranks_of_a_program_that_call_together_meet_in_the_graph(world):
    x, outputs, updates = statistics()
    f = synk.function([x], outputs[0], updates=updates)
    g = synk.function([x], ops.all_reduce(x.sum()))
    synk.distribute()

    def program(rank, rows):
        own = rank.call(f, rows, batch=rank.rows(len(rows)))
        uneven, in_slices = rank.call(g, rows[: rank.rank + 1]), rank.call(g, rows, num_slices=2)
        return float(own), float(uneven), float(in_slices)

    by_rank = synk.spmd(program, ROWS)
    mean = ROWS.mean(0)
    for rank, (own, total, in_slices) in enumerate(by_rank):
        share = np.array_split(ROWS, RANKS)[rank]
        np.testing.assert_allclose(own, ((share - mean) ** 2).mean())
        np.testing.assert_allclose(total, sum(ROWS[: one + 1].sum() for one in range(RANKS)))
        np.testing.assert_allclose(in_slices, RANKS * ROWS.sum() / 2)


def test_ranks_at_different_calls_are_told_so(world):
    x = tt.dmatrix("x")
    f = synk.function([x], ops.all_reduce(x.sum()), name="f")
    g = synk.function([x], ops.all_reduce(x.mean(), "avg"), name="g")
    synk.distribute()

    def program(rank, ends=False):
        if ends:
            return rank.rank or rank.call(f, ROWS)
        return rank.call(g if rank.rank else f, ROWS)

    with pytest.raises(synk.SynkhronosError, match="collectives: rank 0: call.f.*rank 1: call.g"):
        synk.spmd(program)
    with pytest.raises(synk.SynkhronosError, match="waits in a collective for rank.*ended the program"):
        synk.spmd(program, True)
    refused = (RuntimeError, synk.WorkerError)  # whichever rank is the first
    with pytest.raises(refused, match="on_death='continue' cannot use collectives"):
        synk.spmd(program, on_death="continue")


def test_graphs_that_differ_between_ranks_are_an_error_that_names_both(world):
    """As if a rank had compiled another order of the same collectives."""
    synk.distribute()

    def program(rank):
        state = rank._rank_state
        peers = GraphPeers(state, 7)
        peers.weight = 1
        return peers.all_reduce(np.ones(2 + rank.rank), "sum" if rank.rank else "avg", rank.rank)

    with pytest.raises(synk.SynkhronosError, match="different collectives of their graphs") as raised:
        synk.spmd(program)
    assert "rank 0: collective 0 of function 7, all_reduce 'avg' of float64 (2,)" in str(raised.value)
    assert "rank 2: collective 2 of function 7, all_reduce 'sum' of float64 (4,)" in str(raised.value)


@own_process
def test_a_rank_in_the_place_of_a_dead_one_has_memory_of_its_own_for_collectives():
    synk.fork(3, use_gpu=False)
    x = tt.dmatrix("x")
    f = synk.function([x], (ops.all_reduce(x.sum(0)), None))
    rows = np.random.RandomState(1).normal(size=(5, 4000))
    expected = rows.sum(0)
    np.testing.assert_allclose(f(rows), expected)

    def program(rank):
        import os

        if rank.rank == 1 and not rank.restarts:
            os._exit(3)
        return rank.restarts

    assert synk.spmd(program, on_death="continue") == [0, 1, 0]
    for _ in range(3):
        np.testing.assert_allclose(f(rows), expected)


def test_results_of_large_arrays_are_the_callers_own(world):
    """Large arrays are reduced in shared memory, which later calls use as soon as nobody else does."""
    x, seen = tt.dmatrix("x"), compiler.shared(np.zeros(4000), "seen")
    total, rows, first = ops.all_reduce(x.sum(0)), ops.all_gather(x), ops.broadcast(x[0])
    f = synk.function([x], [(one, None) for one in (total, rows, first)], updates=[(seen, total, None)])
    synk.distribute()
    values = np.random.RandomState(1).normal(size=(6, 5, 4000))
    kept = [f(value) for value in values]
    parts = [f(value)[0][1:3] for value in values]  # only views of the results are left
    for value, results, part in zip(values, kept, parts):
        np.testing.assert_allclose(results[0], value.sum(0))
        np.testing.assert_array_equal(results[1], value)
        np.testing.assert_array_equal(results[2], value[2])  # of the master, which has the second rows
        np.testing.assert_array_equal(part, results[0][1:3])
    np.testing.assert_array_equal(synk.gather(seen), [kept[-1][0]] * RANKS)


@own_process
def test_results_of_large_arrays_outlive_the_world():
    synk.fork(2, use_gpu=False)
    x = tt.dmatrix("x")
    f = synk.function([x], (ops.all_reduce(x.sum(0)), None))
    rows = np.random.RandomState(1).normal(size=(5, 4000))
    result = f(rows)
    synk.close()
    synk.fork(2, use_gpu=False)
    np.testing.assert_allclose(result, rows.sum(0))
