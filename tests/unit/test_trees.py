"""Tests of the tree along which commands travel, and of the choice of its radix."""

import math

import pytest

from synkhronos.arithmetic.machines import RADIX, children, parent, subtree

SIZES = [*range(1, 40), 63, 64, 65, 100]


def depth(member, radix=RADIX):
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
