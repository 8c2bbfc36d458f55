"""Python's and NumPy's own generators on the ranks: in operations of the script, and in programs."""

import os
import random
import signal

import numpy as np
import pytest

import synkhronos as synk
from compilers import RandomStreams, Streams, as_op, tt

ROWS = 4


@pytest.fixture(autouse=True)
def kept():
    """The generators of this process afterwards as they were."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(of_python)
    np.random.set_state(of_numpy)


@as_op([tt.dvector], [tt.dvector])
def add_noise(x):
    return x + [random.random() + np.random.rand() for _ in x]


def noisy():
    x = tt.dvector("x")
    return synk.function([x], (add_noise(x), "gather"))


def seed(number=3):
    random.seed(number)
    np.random.seed(number)


def test_each_rank_draws_numbers_of_its_own_and_they_repeat(world_of):
    drawn = []
    for _ in range(2):
        seed()
        world_of(3)
        noise = noisy()
        drawn.append([noise(np.zeros(3 * ROWS)), noise(np.zeros(3 * ROWS))])
    np.testing.assert_array_equal(*drawn)
    assert len(np.unique(drawn)) == 6 * ROWS
    seed()
    own = [random.random() + np.random.rand() for _ in range(ROWS)]
    np.testing.assert_array_equal(drawn[0][0][:ROWS], own)  # the script's, as without other ranks


def test_new_workers_draw_new_numbers(two):
    noise = noisy()
    first = noise(np.zeros(ROWS))
    synk.restart()
    assert len(np.unique([first, noise(np.zeros(ROWS))])) == 2 * ROWS


def test_in_a_program_all_ranks_draw_what_the_script_would(world_of):
    world_of(3)
    noise = noisy()
    noise(np.zeros(3 * ROWS))
    for number in range(2):
        seed(number)
        random.random(), np.random.rand()  # workers must not have the state of an earlier time
        state = random.getstate(), np.random.get_state()
        drawn = synk.spmd(lambda rank: (random.random(), np.random.rand(), np.random.randn()))
        random.setstate(state[0])
        np.random.set_state(state[1])
        assert drawn == [(random.random(), np.random.rand(), np.random.randn())] * 3
        assert len(np.unique(noise(np.zeros(3 * ROWS)))) == 3 * ROWS


def test_a_rank_that_takes_the_place_of_a_dead_one_draws_its_own(world_of):
    world_of(3)
    noise = noisy()

    def program(rank):
        if rank.rank == 1 and not rank.restarts:
            os.kill(os.getpid(), signal.SIGKILL)
        return random.random(), np.random.rand()

    seed()
    expected = random.random(), np.random.rand()
    seed()
    assert synk.spmd(program, on_death="continue") == [expected] * 3
    assert len(np.unique(noise(np.zeros(3 * ROWS)))) == 3 * ROWS


@pytest.mark.parametrize("make", [Streams, RandomStreams])
def test_no_rank_draws_what_one_before_it_has_drawn(two, make):
    draw = synk.function([], make(3).uniform(size=(4,)))
    before = synk.data(shape=(2, 3, 4), dtype="float64")  # drawn by ranks that then died

    def program(rank, before):
        dies = rank.rank == 1 and rank.restarts < 2
        drawn = []
        for step in range(3):
            drawn.append(rank.call(draw))
            if dies:
                before[rank.restarts, step] = drawn[-1]
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return [rank.random.random(4), *drawn]

    numbers = []
    for _ in range(2):
        numbers += [np.ravel(one) for one in synk.spmd(program, before, on_death="continue")]
        numbers.append(before[:].flatten())
    numbers = np.concatenate(numbers)
    assert len(np.unique(numbers)) == len(numbers) == 2 * (2 * 16 + 24)


@pytest.mark.skipif(not hasattr(np.random, "set_bit_generator"), reason="needs NumPy 1.24")
def test_scripts_may_choose_another_generator_of_numpy(world_of):
    former = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        world_of(2)
        noise = noisy()
        assert len(np.unique(noise(np.zeros(2 * ROWS)))) == 2 * ROWS
        one, other = synk.spmd(lambda rank: np.random.rand())
        assert one == other
        np.random.set_bit_generator(np.random.Philox(4))  # the worker still has the former kind
        one, other = synk.spmd(lambda rank: np.random.rand())
        assert one == other
        assert len(np.unique(noise(np.zeros(2 * ROWS)))) == 2 * ROWS
    finally:
        np.random.set_bit_generator(former)
