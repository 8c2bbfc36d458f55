"""Tests of which rows ranks and slices get, of trees of objects, and of comparisons of arrays."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from oracle import batches, examples, selected

from synkhronos import make_slices
from synkhronos.arithmetic.partition import as_slice, select, share, shares
from synkhronos.arithmetic.machines import children, parent, subtree
from synkhronos.arithmetic.minibatches import make_minibatches, n_batches
from synkhronos.arithmetic.comparison import agree, difference, digest, sample, tolerance


@given(n_rows=st.integers(0, 200), number=st.integers(1, 20))
@examples(200)
def test_shares_are_those_of_array_split(n_rows, number):
    rows = np.arange(n_rows)
    expected = np.array_split(rows, number)
    for index, part in enumerate(expected):
        start, stop = share(n_rows, number, index)
        assert rows[start:stop].tolist() == part.tolist()
    lengths = shares(n_rows, number)
    assert lengths == [len(part) for part in expected]
    assert sorted(lengths, reverse=True) == lengths and max(lengths) - min(lengths) <= 1


@given(data=st.data(), length=st.integers(0, 12))
@examples(300)
def test_selected_rows_are_those_of_numpy_indexing(data, length):
    batch = data.draw(batches(length))
    rows = select(batch, length)
    assert list(rows) == selected(batch, np.arange(length)).tolist()
    assert isinstance(rows, range) or (rows.dtype == np.int64 and rows.ndim == 1)


@given(data=st.data(), length=st.integers(0, 12), number=st.integers(1, 6), slices=st.integers(1, 5))
@examples(300)
def test_rows_of_a_slice_stay_a_slice_through_ranks_and_slices(data, length, number, slices):
    maybe = st.none() | st.integers(-15, 15)
    step = st.none() | st.integers(-4, -1) | st.integers(1, 4)
    batch = slice(data.draw(maybe), data.draw(maybe), data.draw(step))
    array = np.arange(length) + 100
    rows = select(batch, length)
    assert isinstance(rows, range)
    got = []
    for rank in range(number):
        own = rows[slice(*share(len(rows), number, rank))]
        assert array[as_slice(own)].tolist() == [array[row] for row in own]
        for index in range(slices):
            part = own[slice(*share(len(own), slices, index))]
            got.extend(array[as_slice(part)].tolist())
    assert got == array[batch].tolist()


@pytest.mark.parametrize(
    "batch, error",
    [
        (True, TypeError), (np.bool_(False), TypeError), (1.0, TypeError), ("rows", TypeError),
        (b"rows", TypeError), ({1, 2}, TypeError), ({1: 2}, TypeError), ([[0, 1]], TypeError),
        (np.array(1), TypeError), (np.zeros((2, 2), bool), TypeError), ([0.0, 1.0], TypeError),
        (np.array([]), TypeError), ([None], TypeError), (slice(0.0, 2), TypeError),
        (slice("a"), TypeError), ([0, 5], IndexError), ([-6], IndexError),
        (np.array([2**64 - 1], "uint64"), IndexError), ([True] * 4, IndexError),
        (np.ones(6, bool), IndexError), (np.ma.array([0, 99], mask=[False, True]), TypeError),
        (np.ma.array([0, 1]), TypeError), (np.ma.array(np.ones(5, bool), mask=np.eye(5)[0]), TypeError),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_batch_is_refused_by_name(batch, error):
    with pytest.raises(error, match="rows for rank 3"):
        select(batch, 5, "rows for rank 3")


def test_rows_of_an_array_of_any_other_class_are_a_plain_array():
    class Mine(np.ndarray):
        def min(self, *args, **kwargs):
            return 0

        max = min

    with pytest.raises(IndexError, match="row 99 is out of range"):
        select(np.array([1, 99]).view(Mine), 5)
    rows = select(np.array([1, -1]).view(Mine), 5)
    assert type(rows) is np.ndarray and rows.tolist() == [1, 4]


def test_a_slice_with_step_zero_is_refused():
    with pytest.raises(ValueError):
        select(slice(None, None, 0), 5)


@given(lengths=st.lists(st.integers(0, 5), max_size=6))
@examples(50)
def test_made_slices_find_each_array_in_the_concatenation(lengths):
    arrays = [np.full((length, 2), number) for number, length in enumerate(lengths)]
    slices = make_slices(arrays)
    assert isinstance(slices, tuple) and len(slices) == len(arrays)
    if arrays:
        joined = np.concatenate(arrays)
        assert slices[-1].stop == len(joined)
        for array, where in zip(arrays, slices):
            np.testing.assert_array_equal(joined[where], array)


@pytest.mark.parametrize("arrays", [3, "ab", np.zeros((2, 2)), [[1], 2]])
def test_slices_of_what_is_no_list_of_arrays_are_refused(arrays):
    with pytest.raises(TypeError):
        make_slices(arrays)


SIZES = [*range(1, 40), 63, 64, 65, 100]


def depth(member, radix):
    return 0 if member == 0 else 1 + depth(parent(member, radix), radix)


@pytest.mark.parametrize("radix", [2, 3, 4, 8])
def test_the_members_of_a_subtree_are_its_top_and_those_below_its_children(radix):
    for size in SIZES:
        for member in range(size):
            below = children(member, size, radix)
            assert all(parent(child, radix) == member for child in below)
            parts = [subtree(child, size, radix) for child in below]
            members = [member, *sorted(one for part in parts for one in part)]
            assert members == list(subtree(member, size, radix)), (size, member)
            assert [len(part) for part in parts] == sorted(map(len, parts), reverse=True)
        assert subtree(0, size, radix) == range(size)
        most = math.ceil(math.log(size, radix) - 1e-9)
        assert all(depth(member, radix) <= most for member in range(size))


@examples(200)
@given(st.integers(1, 5), st.integers(0, 60), st.integers(1, 70), st.integers(0, 3))
def test_ranks_have_the_same_number_of_minibatches_with_every_row_once(ranks, more, size, epoch):
    length = ranks + more
    by_rank = [make_minibatches(length, ranks, rank, size, epoch, 7) for rank in range(ranks)]
    assert {len(own) for own in by_rank} == {n_batches(length, ranks, size)}
    rows = np.concatenate([rows for own in by_rank for rows in own])
    lengths = {len(rows) for own in by_rank for rows in own}
    assert len(set(rows)) == len(rows) and max(lengths) <= size and min(lengths) >= 1
    left_out = length % ranks if size == 1 else 0
    assert len(rows) == length - left_out
    for own in by_rank:
        assert max(map(len, own)) - min(map(len, own)) <= 1


def test_each_seed_epoch_and_rank_has_its_own_order():
    def order(**changes):
        usual = {"length": 80, "ranks": 2, "rank": 0, "batch_size": 10, "epoch": 0, "seed": 1}
        return np.concatenate(make_minibatches(**{**usual, **changes})).tolist()

    assert order() == order() and sorted(order()) == list(range(40))
    assert order(seed=None) == list(range(40))
    others = [order(seed=2), order(epoch=1), order(epoch=2), order(seed=None)]
    assert len({tuple(one) for one in [order(), *others]}) == 5
    assert [one - 40 for one in order(rank=1)] != order()


@pytest.mark.parametrize(
    "length, ranks, size, expected", [(101, 2, 10, 6), (100, 2, 10, 5), (3, 2, 1, 1), (4, 4, 9, 1)]
)
def test_the_longest_share_counts_unless_another_rank_would_have_no_row(length, ranks, size, expected):
    assert n_batches(length, ranks, size) == expected


def test_digests_tell_arrays_apart_by_values_shape_and_dtype():
    base = np.arange(6.0)
    assert digest(base) == digest(base.copy()) == digest(np.arange(12.0)[::2] / 2)
    others = [base + 1, base.reshape(2, 3), base.astype("float32"), base[:5], base.view("int64")]
    assert len({digest(one) for one in [base, *others]}) == 6
    assert digest(np.asfortranarray(base.reshape(2, 3))) == digest(base.reshape(2, 3))
    assert digest(np.array(1.0)) != digest(np.array([1.0])) and digest(np.zeros((0, 2)))


@pytest.mark.parametrize(
    "shape", [(), (0,), (5,), (1000,), (3, 1000), (1000, 3), (40, 50, 60), (7, 1, 999)]
)
@pytest.mark.parametrize("limit", [1, 10, 100, 10**6])
def test_a_sample_is_a_view_of_at_most_so_many_elements(shape, limit):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    part = sample(array, limit)
    assert part.ndim == array.ndim and part.size <= max(limit, 0 if array.size == 0 else 1)
    assert np.shares_memory(part, array) or not part.size
    assert set(part.ravel()) <= set(array.ravel())
    if array.size <= limit:
        assert part is array
    else:
        assert part.size >= limit / 4  # evenly spaced, not a corner
        assert array.size < 4 or part.max() >= array.size / 4 or limit < 4


def test_a_difference_is_absolute_and_relative_to_the_largest_value():
    assert difference(np.array([1.0, 2.0]), np.array([1.0, 4.0])) == (2.0, 0.5)
    assert difference(np.zeros(0), np.zeros(0)) == (0, 0)
    assert difference(np.array([0.0]), np.array([0.0])) == (0, 0)
    assert difference(np.array([1.0]), np.array([0.0])) == (1, np.inf)
    assert difference(np.array([np.nan, np.inf]), np.array([np.nan, np.inf])) == (0, 0)
    assert difference(np.array([np.nan, 1.0]), np.array([1.0, 1.0])).absolute == np.inf
    assert difference(np.array([True]), np.array([False])) == (1, np.inf)
    assert difference(np.array([200], "uint8"), np.array([100], "uint8")) == (100, 1)
    assert difference(np.array([3 + 4j]), np.array([0j])).absolute == 5
    big = np.array([3e38], "float32")
    assert np.isfinite(difference(big, -big).absolute)
    assert "by up to 2 (0.5 of" in str(difference(np.array([2.0]), np.array([4.0])))


def test_agreement_is_within_what_is_allowed_and_else_exact():
    assert agree(np.array([1.0, np.nan]), np.array([1.001, np.nan]), 1e-2)
    assert not agree(np.array([1.0]), np.array([1.001]), 1e-4)
    assert not agree(np.array([np.nan]), np.array([1.0]), 1e9)
    assert not agree(np.array([np.inf]), np.array([1.0]), 1e9)
    big = np.array([2**53], "int64")
    assert agree(big, big, 0) and not agree(big, big + 1, 0)
    assert not agree(np.array([np.nan]), np.array([1.0]), 0)


def test_single_precision_of_the_operands_limits_the_precision():
    assert tolerance("float64") == 1e-7 == tolerance("complex128")
    assert tolerance("float32") == 1e-4 == tolerance("float64", ["float32", "int32"])
    assert tolerance("float64", ["float16", "int8"]) == 1e-7
    assert tolerance("float16") == 1e-2
    assert tolerance("int64", ["float32"]) == 0 == tolerance("bool")
