"""Tests of large outputs, which are reduced in the memory in which they were computed."""

import numpy as np
import pytest
from compilers import compiler, tt
from oracle import WORLD_IDS, WORLDS

import synkhronos as synk
from synkhronos.comms.shm import SharedMemoryCommunicator
from synkhronos.world.rank_state import Command
from synkhronos.world.world import current_world

N = 70_001  # several pieces for each dtype; the last piece is shorter
OPS = ["avg", "sum", "prod", "min", "max"]


class Pool:
    """The functions of one world. Most outputs are sums over the rank's rows, of length `N`."""

    def __init__(self, size, master_rank):
        self.size, self.master_rank = size, master_rank
        x = tt.fmatrix("x")
        total = x.sum(axis=0)
        self.serial = compiler.function([x], total)
        self.every = synk.function([x], [(total, op) for op in OPS])
        self.halves = synk.function([x], (tt.cast(total, "float16"), "avg"))
        counts = tt.cast(total, "int8")
        self.counts = synk.function([x], [(counts, "sum"), (counts, "max")])
        self.turned = synk.function([x], ((2 * x).T, "sum"))
        self.lengths = synk.function([x], (x.flatten(), "sum"))
        self.rows = compiler.shared(np.zeros((0, N), "float32"), "rows")
        self.held = synk.function(
            [], [(self.rows.sum(axis=0), op) for op in OPS], sliceable_shareds=[self.rows]
        )
        self.weights = compiler.shared(np.arange(N, dtype="float32"), "weights")
        v = tt.fvector("v")
        table = tt.constant(np.arange(N, dtype="float32"))
        new = self.weights + 1
        others = [(one, "sum") for one in (self.weights, v, table, new, new)]
        self.others = synk.function([], others, bcast_inputs=[v], updates=[(self.weights, new)])
        synk.distribute()


@pytest.fixture(scope="module", params=WORLDS, ids=WORLD_IDS)
def pool(request, open_world):
    size, master_rank = request.param
    open_world(size, master_rank=master_rank)
    return Pool(size, master_rank)


def make(n_rows, seed=3):
    return np.random.default_rng(seed).normal(size=(n_rows, N)).astype("float32")


def totals(pool, x):
    """Return the sums that the ranks compute, and their numbers of rows, for ranks with rows."""
    parts = [part for part in np.array_split(x, pool.size) if len(part)]
    return [pool.serial(part) for part in parts], [len(part) for part in parts]


def fold(op, values, weights):
    """Return the reduction in rank order, in the dtype of the values.

    Averages of half precision are computed in single precision.
    """
    if op != "avg":
        combine = dict(sum=np.add, prod=np.multiply, min=np.minimum, max=np.maximum)[op]
        result = values[0]
        for value in values[1:]:
            result = combine(result, value)
        return result
    wide = np.promote_types(values[0].dtype, "float32")
    if len(set(weights)) == 1:
        weights = [1] * len(values)
    result = np.zeros(values[0].shape, wide)
    for value, weight in zip(values, weights):
        result += value.astype(wide) * wide.type(weight)
    return (result / wide.type(sum(weights))).astype(values[0].dtype)


def assert_bits(got, expected):
    assert type(got) is np.ndarray and got.flags.writeable
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("n_rows", [1, 2, 7, 8])
@pytest.mark.parametrize("where", ["inputs", "sliceable"])
def test_outputs_are_reduced_in_rank_order_weighted_by_rows(pool, n_rows, where):
    x = make(n_rows)
    values, weights = totals(pool, x)
    if where == "sliceable":
        synk.scatter(pool.rows, x)
    got = pool.every(synk.data(x)) if where == "inputs" else pool.held()
    for one, op in zip(got, OPS):
        assert_bits(one, fold(op, values, weights))


def test_a_master_without_rows_gets_the_others_result(pool):
    x = make(2 * pool.size)
    synk.scatter(pool.rows, x)
    batches = [slice(rank % 2 + 1) for rank in range(pool.size)]
    if pool.size > 1:
        batches[pool.master_rank] = slice(0)
    values, weights = [], []
    for part, batch in zip(np.split(x, pool.size), batches):
        if len(part[batch]):
            values.append(pool.serial(part[batch]))
            weights.append(len(part[batch]))
    for one, op in zip(pool.held(batch_s=batches), OPS):
        assert_bits(one, fold(op, values, weights))


@pytest.mark.parametrize("n_rows", [4, 5])
def test_dtypes_stay_and_integers_wrap_around(pool, n_rows):
    x = np.round(40 * make(n_rows)).clip(-60, 60)
    values, weights = totals(pool, x)
    halves = [value.astype("float16") for value in values]
    assert_bits(pool.halves(x), fold("avg", halves, weights))
    x = x / 4
    counts = [value.astype("int8") for value in totals(pool, x)[0]]
    total, largest = pool.counts(x)
    assert_bits(total, fold("sum", counts, weights))
    assert_bits(largest, fold("max", counts, weights))


def test_an_output_may_have_another_memory_order(pool):
    x = make(2 * pool.size)
    assert not pool.turned.as_theano(x).flags.c_contiguous
    assert_bits(pool.turned(x), fold("sum", np.split(2 * x.T, pool.size, axis=1), None))


def test_an_output_named_twice_is_two_arrays(pool):
    x = make(5)
    expected = fold("sum", totals(pool, x)[0], None)
    one, other, largest = pool.every(x, output_subset=[1, 1, 4])
    assert not np.shares_memory(one, other)
    assert_bits(one, expected)
    assert_bits(other, expected)
    assert_bits(largest, fold("max", totals(pool, x)[0], None))


def test_what_is_returned_is_the_callers_alone(pool):
    x = make(6)
    values, weights = totals(pool, x)
    first = pool.every(x)
    kept = [one.copy() for one in first]
    for one in pool.every(synk.data(2 * x)):
        one[...] = np.nan
    for one, op, before in zip(first, OPS, kept):
        assert_bits(one, before)
        assert_bits(one, fold(op, values, weights))


def test_variables_and_inputs_that_are_outputs_are_not_written_to(pool):
    v = np.full(N, 3, "float32")
    data = synk.data(v)
    old = np.arange(N, dtype="float32")
    for step in range(2):
        outputs = pool.others(data)
        now = old + step
        for got, each in zip(outputs, (now, v, old, now + 1, now + 1)):
            assert_bits(got, fold("sum", [each] * pool.size, None))
            got[...] = np.nan
        for rank in range(pool.size):
            assert_bits(np.asarray(synk.get_value(rank, pool.weights)), now + 1)
    assert_bits(data.data, v)
    synk.broadcast(pool.weights, old)


def test_unequal_shapes_are_refused_by_rank(pool):
    if pool.size == 1:
        assert pool.lengths(make(3)).shape == (3 * N,)
        return
    with pytest.raises(ValueError, match=rf"rank 0: \({2 * N},\).*rank 1: \({N},\).*gather"):
        pool.lengths(make(pool.size + 1))
    assert_bits(pool.lengths(make(pool.size)), fold("sum", list(make(pool.size)), None))


class InPlace(SharedMemoryCommunicator):
    """A communicator that reduces ``float32`` vectors in place, and records its reductions."""

    reduces_in_place = True

    def __init__(self, group, store):
        super().__init__(group, store)
        self.reductions = []

    def takes(self, array):
        return array.ndim == 1 and array.dtype == np.float32

    def reduce(self, arrays, op, root, weight=1):
        self.reductions.append((op, len(arrays), weight))
        return super().reduce(arrays, op, root, weight)


class Use(Command):
    def __init__(self, in_place):
        self.in_place = in_place

    def run(self, state):
        state.comm = state.transport.communicator()
        if self.in_place:
            state.comm = InPlace(state.transport, state.store)


@pytest.fixture
def reductions(pool):
    """Function that returns the master's reductions since it was last called."""
    world = current_world()
    world.run(Use(True))

    def taken():
        done, world.rank_state.comm.reductions[:] = list(world.rank_state.comm.reductions), []
        return done

    yield taken
    world.run(Use(False))


def assert_all_close(got, ops, values, weights):
    for one, op in zip(got, ops):
        expected = fold(op, values, weights)
        assert one.dtype == expected.dtype
        np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-6)


def test_outputs_are_reduced_where_they_are(pool, reductions):
    for n_rows in (pool.size, 2 * pool.size + 1):
        x = make(n_rows)
        values, weights = totals(pool, x)
        own = weights[pool.master_rank]
        assert_all_close(pool.every(x), OPS, values, weights)
        assert reductions() == [(op, 1, own) for op in OPS]
        assert_all_close(pool.every(x, output_subset=[2, 0]), ["prod", "avg"], values, weights)
        assert reductions() == [("avg", 1, own), ("prod", 1, own)]
    world = current_world()
    once = np.full(N, 3, "float32")
    outputs = pool.others(once)  # five outputs, all of which are sums
    assert reductions() == [("sum", 5, 1)]
    np.testing.assert_array_equal(outputs[1], once * world.size)
    synk.broadcast(pool.weights, np.arange(N, dtype="float32"))


def test_other_outputs_and_those_of_too_few_rows_go_to_the_master(pool, reductions):
    x = np.round(make(2 * pool.size))
    counts = [value.astype("int8") for value in totals(pool, x)[0]]
    for one, op in zip(pool.counts(x), ("sum", "max")):
        assert_bits(one, fold(op, counts, None))
    for n_rows in range(1, pool.size):
        x = make(n_rows)
        assert_all_close(pool.every(x), OPS, *totals(pool, x))
    x = make(2 * pool.size)
    synk.scatter(pool.rows, x)
    reductions()
    # The number of rows of a sliceable variable is known only to its rank.
    assert_all_close(pool.held(), OPS, *totals(pool, x))
    assert reductions() == []
