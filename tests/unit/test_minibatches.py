"""Tests of the minibatches of the ranks: every row once, no rank waits for another."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import examples

from synkhronos.arithmetic.minibatches import make_minibatches, n_batches


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
