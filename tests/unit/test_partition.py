"""Tests of which rows each rank and each slice gets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import batches, examples, selected

from synkhronos import make_slices
from synkhronos.arithmetic.partition import as_slice, select, share, shares


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
