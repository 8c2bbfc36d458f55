"""Outputs that are large: reduced in the memory that they were computed in, and nobody else's."""

import numpy as np
import pytest
import theano
import theano.tensor as tt
from oracle import WORLD_IDS, WORLDS

import synkhronos as synk

N = 70_001  # some pieces of each dtype, the last one short
OPS = ["avg", "sum", "prod", "min", "max"]


class Pool:
    """The functions of one world; each output is a vector as long as the sum over the rank's rows."""

    def __init__(self, size, master_rank):
        self.size, self.master_rank = size, master_rank
        x = tt.fmatrix("x")
        total = x.sum(axis=0)
        self.serial = theano.function([x], total)
        self.every = synk.function([x], [(total, op) for op in OPS])
        self.halves = synk.function([x], tt.cast(total, "float16"))
        counts = tt.cast(total, "int8")
        self.counts = synk.function([x], [(counts, "sum"), (counts, "max")])
        self.turned = synk.function([x], ((2 * x).T, "sum"))
        self.lengths = synk.function([x], (x.flatten(), "sum"))
        self.rows = theano.shared(np.zeros((0, N), "float32"), "rows")
        self.held = synk.function([], [(self.rows.sum(axis=0), op) for op in OPS],
                                  sliceable_shareds=[self.rows])
        self.weights = theano.shared(np.arange(N, dtype="float32"), "weights")
        v = tt.fvector("v")
        table = tt.constant(np.arange(N, dtype="float32"))
        new = self.weights + 1
        self.others = synk.function([], [(one, "sum") for one in (self.weights, v, table, new, new)],
                                    bcast_inputs=[v], updates=[(self.weights, new)])
        synk.distribute()


@pytest.fixture(scope="module", params=WORLDS, ids=WORLD_IDS)
def pool(request, open_world):
    size, master_rank = request.param
    open_world(size, master_rank=master_rank)
    return Pool(size, master_rank)


def make(n_rows, seed=3):
    return np.random.default_rng(seed).normal(size=(n_rows, N)).astype("float32")


def totals(pool, x):
    """Return what each rank computes, and its number of rows; ranks without rows are left out."""
    parts = [part for part in np.array_split(x, pool.size) if len(part)]
    return [pool.serial(part) for part in parts], [len(part) for part in parts]


def fold(op, values, weights):
    """Return the reduction, rank after rank, in the dtype of the values; halves in single."""
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
def test_ranks_are_folded_in_their_order_each_with_its_rows(pool, n_rows, where):
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


def test_an_output_may_lie_in_memory_in_another_order(pool):
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


def test_what_an_output_is_equal_to_is_not_written_to(pool):
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


def test_several_calls_in_one_command_have_each_their_own(pool):
    x, y = make(5), make(5, seed=4)
    with synk.fuse():
        one, other = pool.every(x), pool.every(y)
    for results, rows in ((one.result(), x), (other.result(), y)):
        values, weights = totals(pool, rows)
        for got, op in zip(results, OPS):
            assert_bits(got, fold(op, values, weights))


def test_unequal_shapes_are_refused_by_rank(pool):
    if pool.size == 1:
        assert pool.lengths(make(3)).shape == (3 * N,)
        return
    with pytest.raises(ValueError, match=rf"rank 0: \({2 * N},\).*rank 1: \({N},\).*gather"):
        pool.lengths(make(pool.size + 1))
    assert_bits(pool.lengths(make(pool.size)), fold("sum", list(make(pool.size)), None))
