"""Tests of which rows are in which batch, and who loads them."""

import numpy as np
import pytest

from synkhronos.arithmetic.minibatches import BatchPlan


def make(length, batch_size, ranks=1, processes=1, **options):
    options = {"seed": 0, "shuffle": True, "drop_last": False, "takes_turns": False, **options}
    return BatchPlan(length, batch_size, processes=processes, ranks=ranks, **options)


@pytest.mark.parametrize("takes_turns", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 3, 7])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_and_processes_have_each_row_once(ranks, processes, takes_turns):
    plan = make(23, 5, ranks, processes, takes_turns=takes_turns)
    assert plan.n_batches == 5
    for number in range(12):
        epoch, batch = plan.locate(number)
        assert (epoch, batch) == divmod(number, 5)
        parts = [plan.part(number, rank, one) for rank in range(ranks) for one in range(processes)]
        assert sorted(row for part in parts for row in part) == list(range(5 if batch < 4 else 3))
        lengths = [len(plan.share(batch, rank)) for rank in range(ranks)]
        assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1
        if takes_turns:
            owners = {one for rank in range(ranks) for one in range(processes)
                      if len(plan.part(number, rank, one))}  # fmt: skip
            assert owners == {number % processes}


@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_places_of_ranks_do_not_overlap_whatever_batch_each_is_at(ranks):
    for rest in range(8):
        plan = make(80 + rest, 8, ranks)
        places = []
        for rank in range(ranks):
            longest = max(len(plan.share(batch, rank)) for batch in range(plan.n_batches))
            places.append(range(plan.place(rank), plan.place(rank) + longest))
        assert sorted(row for one in places for row in one) == list(range(8))


@pytest.mark.parametrize(
    "length, ranks, drop_last, expected",
    [(20, 1, False, 4), (21, 1, False, 5), (21, 2, False, 4), (22, 2, False, 5), (24, 1, True, 4)],
)
def test_the_last_batch_needs_a_row_for_each_rank(length, ranks, drop_last, expected):
    assert make(length, 5, ranks, drop_last=drop_last).n_batches == expected


def test_the_number_of_batches_is_that_of_the_epochs():
    plan = make(23, 5, epochs=2, first=3)
    assert plan.has(9) and not plan.has(10) and plan.locate(9) == (4, 4)
    assert make(23, 5).has(10**9)


def test_the_order_is_that_of_the_source_unless_it_is_shuffled():
    class Source:
        def order(self, generator):
            return generator.permutation(6)[::-1]

    expected = np.random.default_rng([4, 2]).permutation(6)[::-1]
    assert make(6, 2, seed=4).order(Source(), 2).tolist() == expected.tolist()
    with pytest.raises(ValueError, match="expected an array of 7 row numbers, got one of"):
        make(7, 2).order(Source(), 2)
    assert make(6, 2, shuffle=False).order(Source(), 2).tolist() == list(range(6))
