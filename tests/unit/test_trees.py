"""Tests of the trees along which messages reach many ranks."""

import pytest

from synkhronos.arithmetic.trees import children, depth, parent

SIZES = [1, 2, 3, 8, 9, 10, 16, 17, 64, 73, 74, 200]


@pytest.mark.parametrize("radix", [1, 2, 3, 8])
@pytest.mark.parametrize("size", SIZES)
def test_every_place_but_the_root_is_below_exactly_one_which_is_its_parent(size, radix):
    below = [(place, child) for place in range(size) for child in children(place, size, radix)]
    assert [child for _, child in below] == list(range(1, size))
    assert all(parent(child, radix) == place < child for place, child in below)
    assert all(len(children(place, size, radix)) <= radix for place in range(size))


@pytest.mark.parametrize("radix", [1, 2, 3, 8])
@pytest.mark.parametrize("size", SIZES)
def test_the_depth_is_that_of_the_last_place(size, radix):
    levels, reached = 0, [0]
    while reached[-1] != size - 1:
        reached = [child for place in reached for child in children(place, size, radix)]
        levels += 1
    assert depth(size, radix) == levels


def test_a_tree_of_binary_digits():
    assert [list(children(place, 6, 2)) for place in range(6)] == [[1, 2], [3, 4], [5], [], [], []]
    assert [depth(size, 2) for size in (1, 2, 3, 4, 7, 8)] == [0, 1, 1, 2, 2, 3]
    assert [depth(size, 8) for size in (9, 10, 73, 74)] == [1, 2, 2, 3]
