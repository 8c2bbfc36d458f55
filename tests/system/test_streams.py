"""Tests of random streams: independent on every rank, reproducible, and as in Theano on the master."""

import numpy as np
import pytest
import theano
import theano.tensor as tt
from theano.sandbox.rng_mrg import A1p134, A2p134, MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos.arithmetic import streams as _streams
from synkhronos.arithmetic.streams import jump_mrg

MAKERS = [MRG_RandomStreams, RandomStreams]
WORLDS = [(1, 0), (2, 1), (3, 0)]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def make_streams(request):
    return request.param


def runs(draws, length=4):
    """Return the set of all runs of `length` consecutive draws."""
    return {tuple(draws[k : k + length]) for k in range(len(draws) - length + 1)}


def assert_independent(sequences):
    """Check that no two sequences have a run in common, so that none is a shifted copy of another."""
    for position, one in enumerate(sequences):
        assert len(set(one.tolist())) > 0.9 * len(one)
        for other in sequences[:position]:
            assert not runs(one.tolist()) & runs(other.tolist())


def noise_in_two_places(make, seed):
    streams = make(seed)
    return streams.uniform((50,)), streams.uniform((50,)) + 0 * streams.normal((50,))


def draw(functions, size, calls=3):
    """Return the draws of each rank, for each output."""
    drawn = [
        [output.reshape(size, -1) for function in functions for output in function()]
        for _ in range(calls)
    ]
    return [np.concatenate(rows, axis=1) for rows in zip(*drawn)]


@pytest.mark.parametrize("size, master_rank", WORLDS)
def test_ranks_draw_different_numbers_and_the_master_those_of_theano(
    world_of, make_streams, size, master_rank
):
    world_of(size, master_rank=master_rank)
    outputs = noise_in_two_places(make_streams, 7)
    f = synk.function([], [(output, "gather") for output in outputs])
    synk.distribute()
    first, second = draw([f], size)
    assert_independent([*first, *second])
    serial = theano.function([], list(noise_in_two_places(make_streams, 7)))
    for _, expected in zip(range(3), [serial() for _ in range(3)]):
        np.testing.assert_array_equal(first[master_rank][:50], expected[0])
        np.testing.assert_array_equal(second[master_rank][:50], expected[1])
        first, second = first[:, 50:], second[:, 50:]


def test_a_run_repeats_bit_for_bit_given_its_seed_and_the_number_of_ranks(world_of, make_streams):
    drawn = []
    for seed in (3, 3, 4):
        world_of(2)
        f = synk.function([], [(one, "gather") for one in noise_in_two_places(make_streams, seed)])
        drawn.append(np.concatenate(draw([f], 2), axis=1).tobytes())
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("master_rank", [0, 1])
def test_streams_of_functions_distributed_later_are_independent_too(world_of, make_streams, master_rank):
    world_of(2, master_rank=master_rank)
    streams = make_streams(5)
    shared_noise = streams.uniform((50,))
    early = synk.function([], [(shared_noise, "gather"), (streams.uniform((50,)), "gather")])
    synk.distribute()
    first = draw([early], 2)
    late = synk.function([], [(shared_noise, "gather"), (streams.uniform((50,)), "gather")])
    second = draw([late], 2)
    third = draw([early], 2)
    # On every rank, both functions advance the stream that they share.
    common = np.concatenate([first[0], second[0], third[0]], axis=1)
    assert_independent([*common, *first[1], *second[1]])
    for rank in range(2):
        assert len(runs(common[rank].tolist(), 1)) > 0.95 * common.shape[1]


def test_streams_inside_a_loop_of_the_graph_are_independent_too(two, make_streams):
    streams = make_streams(5)

    def step(total):
        return total + streams.uniform((20,))

    walk, updates = theano.scan(step, outputs_info=[tt.zeros(20)], n_steps=3)
    f = synk.function([], (walk[-1], "gather"), updates=updates)
    values = np.concatenate([f().reshape(2, -1) for _ in range(3)], axis=1)
    assert_independent(list(values))


def test_a_mask_that_depends_on_data_differs_between_ranks_and_slices(two, make_streams):
    x = tt.matrix("x")
    noise = make_streams(9).uniform(x.shape)
    f = synk.function([x], (x * noise, "gather"))
    ones = np.ones((8, 25), theano.config.floatX)
    drawn = [f(ones), f(ones, num_slices=2), f(ones, num_slices=4)]
    assert_independent([rows for block in drawn for rows in block])


def test_every_slice_and_call_draws_on_from_where_the_last_one_stopped(world_of, make_streams):
    world_of(1)
    x = tt.matrix("x")
    f = synk.function([x], (x * make_streams(9).uniform(x.shape), "gather"))
    serial = theano.function([x], x * make_streams(9).uniform(x.shape))
    ones = np.ones((6, 5), theano.config.floatX)
    expected = np.concatenate([serial(ones[:2]) for _ in range(6)])
    got = np.concatenate([f(ones, num_slices=3), f(ones, num_slices=3)])
    np.testing.assert_array_equal(got, expected)


def test_a_stream_drawn_from_before_distribute_goes_on_in_the_master(two, make_streams):
    f = synk.function([], (make_streams(2).uniform((50,)), "gather"))
    serial = theano.function([], make_streams(2).uniform((50,)))
    np.testing.assert_array_equal(f.as_theano(), serial())
    values = f().reshape(2, -1)
    np.testing.assert_array_equal(values[0], serial())
    assert_independent(list(values))


def matrix_power(matrix, exponent, modulus):
    result = np.identity(3, int).astype(object)
    matrix = np.array(matrix).astype(object)
    while exponent:
        if exponent & 1:
            result = result @ matrix % modulus
        matrix = matrix @ matrix % modulus
        exponent >>= 1
    return result


def test_a_jump_is_two_to_the_26_of_the_distances_between_theanos_streams():
    state = np.array([11, 22, 33, 44, 55, 66], "int32")
    jumped = jump_mrg(state, 1)
    for part, far in enumerate((A1p134, A2p134)):
        modulus = _streams._MODULI[part]
        rows = slice(3 * part, 3 * part + 3)
        expected = matrix_power(far, 2**26, modulus) @ state[rows].astype(object) % modulus
        assert jumped[rows].tolist() == expected.tolist()
