"""Tests of groups of ranks, which have collectives of their own in a program."""

import os
import signal

import numpy as np
import pytest
from compilers import compiler

import synkhronos as synk
from synkhronos._errors import SynkhronosError

RANKS = 4
REFUSED = (SynkhronosError, TypeError, ValueError)  # of the master, or of the rank that raised it first


@pytest.fixture(scope="module")
def world(open_world):
    open_world(RANKS, timeout=60)


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
def test_arrays_are_reduced_within_each_group(world, op):
    def program(rank):
        group = rank.split(rank.rank % 2)
        random = np.random.RandomState(rank.rank)
        arrays = [random.randint(1, 9, shape).astype("float32") for shape in ((3, 2), ())]
        reduced = [group.all_reduce(arrays, op) for _ in range(1 + rank.rank % 2)][-1]
        return arrays, reduced, float(group.all_reduce(rank.rank, "sum"))

    results = synk.spmd(program)
    function = {"avg": "mean"}.get(op, op)
    for rank, (_, reduced, total) in enumerate(results):
        members = [rank % 2, rank % 2 + 2]
        for k in range(2):
            expected = getattr(np.array([results[one][0][k] for one in members]), function)(axis=0)
            np.testing.assert_allclose(reduced[k], expected, rtol=1e-6)
        assert total == sum(members)


def test_the_order_is_that_of_the_keys(world):
    def program(rank):
        group = rank.split(0, key=-rank.rank)
        assert group.ranks == (3, 2, 1, 0) and group.rank == 3 - rank.rank and group.size == RANKS
        return group.exchange(rank.rank), repr(group)

    for rank, (values, text) in enumerate(synk.spmd(program)):
        assert values == [3, 2, 1, 0]
        assert text == f"<synkhronos.RankGroup {3 - rank} of 4, ranks (3, 2, 1, 0)>"


def test_a_rank_may_be_in_several_groups_or_in_none(world):
    def program(rank):
        rows, columns = rank.split(rank.rank // 2), rank.split(rank.rank % 2)
        total = float(columns.all_reduce(rows.all_reduce(rank.rank, "sum"), "sum"))
        few = rank.split(None if rank.rank == 2 else 7)
        rank.barrier()
        alone = rank.split(rank.rank)
        return total, few and few.exchange(rank.rank), alone.exchange("own"), alone.size

    first = [0, 1, 3]
    assert synk.spmd(program) == [(6.0, None if k == 2 else first, ["own"], 1) for k in range(RANKS)]


def test_variables_of_a_rank_are_reduced_with_weights(world):
    def program(rank):
        w = compiler.shared(np.full(2, float(rank.rank)), "w")
        b = compiler.shared(np.float32(rank.rank), "b")
        group = rank.split(rank.rank // 2)
        assert group.all_reduce([w, b], weight=1 + rank.rank) is None
        with_one = group.all_reduce(np.ones(1), "max")
        return w.get_value().tolist(), float(b.get_value()), with_one.tolist()

    low, high = 2 / 3, (2 * 3 + 3 * 4) / 7
    for rank, (w, b, one) in enumerate(synk.spmd(program)):
        expected = high if rank // 2 else low
        assert w == pytest.approx([expected] * 2) and b == pytest.approx(expected) and one == [1.0]


def test_groups_do_not_wait_for_each_other(world):
    def program(rank):
        group = rank.split(rank.rank // 2)
        if rank.rank // 2:
            for number in range(50):
                assert group.exchange(number) == [number] * 2
            rank.clock = 1
        else:
            rank.wait_for_clocks(0)
            while not min(rank.clocks[2:]):
                pass
            group.barrier()
        rank.barrier()

    synk.spmd(program)


def test_ranks_at_different_points_get_errors_that_list_them(world):
    def program(rank):
        group = rank.split(rank.rank // 2)
        try:
            if rank.rank == 3:
                group.exchange(0)
            else:
                group.barrier()
        except SynkhronosError as error:
            return str(error)

    messages = synk.spmd(program)
    assert messages[:2] == [None, None]
    for message in messages[2:]:
        assert "rank 2: barrier(); rank 3: exchange()" in message


def test_a_rank_that_has_ended_is_not_waited_for(world):
    def program(rank):
        group = rank.split(rank.rank // 2)
        if rank.rank != 1:
            group.barrier()

    with pytest.raises(REFUSED, match="rank 1 has ended its program, and others of its group"):
        synk.spmd(program)
    assert synk.spmd(lambda rank: rank.split(0).exchange(1)) == [[1] * RANKS] * RANKS


def test_an_error_of_a_rank_ends_the_waits_of_its_group(world):
    def program(rank):
        group = rank.split(rank.rank // 2)
        if rank.rank == 2:
            raise KeyError("of rank 2")
        group.barrier()
        group.barrier()

    with pytest.raises((KeyError, synk.WorkerError), match="of rank 2"):
        synk.spmd(program)


def test_a_request_to_stop_ends_the_waits(world):
    def program(rank):
        group = rank.split(rank.rank // 2)
        if rank.rank == 1:
            rank.stop()
        while True:
            group.barrier()

    results = synk.spmd(program)
    assert results == [None] * RANKS and results.stopped


def test_ranks_of_a_group_stop_at_the_same_step(world):
    def program(rank):
        group = rank.split(rank.rank // 2)
        steps, rank.in_step = 0, True  # before another group may ask to stop
        while not rank.should_stop:
            steps = int(group.all_reduce(steps + 1, "max"))
            if rank.rank == 0 and steps == 5:
                rank.stop()
        return steps

    first, second, third, fourth = synk.spmd(program)
    assert first == second >= 5 and third == fourth


def test_wrong_arguments_are_refused_in_words(world):
    for wrong, words in (
        (lambda rank: rank.split("a"), "rank.split: color: expected an int, got 'a'"),
        (lambda rank: rank.split(0, key=0.5), "rank.split: key: expected an int"),
        (lambda rank: rank.split(0).all_reduce(np.ones(2), "sum", weight=2), "which is not an average"),
        (
            lambda rank: rank.split(0).all_reduce([compiler.shared(np.ones(1)), np.ones(1)]),
            "expected shared variables or arrays, got both",
        ),
    ):
        with pytest.raises(REFUSED, match=words):
            synk.spmd(wrong)
    with pytest.raises(RuntimeError, match="has ended"):
        kept = []
        synk.spmd(lambda rank: rank.is_master and kept.append(rank))
        kept[0].split(0)
    with pytest.raises((RuntimeError, synk.WorkerError), match="cannot use collectives"):
        synk.spmd(lambda rank: rank.split(0), on_death="continue")


def test_a_dead_rank_ends_the_waits_of_its_group(world_of):
    world_of(RANKS, timeout=60)

    def program(rank):
        group = rank.split(rank.rank // 2)
        if rank.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(1000):
            group.barrier()

    with pytest.raises(synk.WorldBrokenError):
        synk.spmd(program)
