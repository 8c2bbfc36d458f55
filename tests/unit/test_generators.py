"""Tests of NumPy's random generators as states of streams: substreams, and arrays for files."""

import numpy as np
import pytest

from synkhronos.arithmetic.streams import (
    check_has_substreams,
    jump_generator,
    state_from_array,
    state_to_array,
)

KINDS = ["MT19937", "PCG64", "PCG64DXSM", "Philox"]


def generator(kind, seed=5):
    return np.random.Generator(getattr(np.random, kind)(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_substreams_are_those_of_numpy_and_leave_the_given_generator_alone(kind):
    given = generator(kind)
    given.random(3)
    jumped = [jump_generator(given, index) for index in range(3)]
    numbers = [one.random(50) for one in jumped]
    assert len(set(np.concatenate(numbers))) == 150
    expected = generator(kind)
    expected.random(3)
    expected = np.random.Generator(expected.bit_generator.jumped(2))
    np.testing.assert_array_equal(numbers[2], expected.random(50))
    np.testing.assert_array_equal(numbers[0], given.random(50))
    assert type(jumped[1].bit_generator).__name__ == kind


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_has_the_whole_state(kind):
    given = generator(kind)
    given.random(3, dtype="float32")  # leaves half of a word, and part of a block
    array = state_to_array(given)
    assert array.dtype == np.uint64 and array.ndim == 1
    loaded = state_from_array(array)
    for draw in (lambda one: one.random(3, dtype="float32"), lambda one: one.normal(size=2000)):
        np.testing.assert_array_equal(draw(loaded), draw(given))
    assert type(loaded.bit_generator).__name__ == kind


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_no_state_are_refused(kind):
    array = state_to_array(generator(kind))
    for wrong in (array[:-1], np.append(array, array[:1]), array.reshape(1, -1), array[:0]):
        with pytest.raises(ValueError, match="state of a random generator"):
            state_from_array(wrong)
    unknown = array.copy()
    unknown[0] = 9
    with pytest.raises(ValueError, match="state of a random generator"):
        state_from_array(unknown)


@pytest.mark.parametrize(
    "kind, position, value",
    [("MT19937", -1, 625), ("MT19937", 1, 2**32), ("PCG64", 3, 2), ("PCG64", 5, 2), ("PCG64", 6, 2**32),
     ("Philox", 7, 5)],
)  # fmt: skip
def test_numbers_out_of_their_range_are_refused(kind, position, value):
    array = state_to_array(generator(kind))
    array[position] = value
    with pytest.raises(ValueError, match="state of a random generator"):
        state_from_array(array)


def test_a_generator_without_substreams_is_refused():
    with pytest.raises(TypeError, match="substreams for the ranks, got one of SFC64"):
        check_has_substreams(generator("SFC64"))
    check_has_substreams(generator("PCG64"))
    check_has_substreams(np.random.RandomState(0))
