"""Tests of the tree along which commands travel, and of the choice of its radix."""

import json
import math

import pytest
from processes import ROOT

from synkhronos.arithmetic.trees import RADIX, children, parent, subtree

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


def test_the_first_member_has_a_child_for_each_doubling():
    for size in SIZES:
        assert len(children(0, size)) == (size - 1).bit_length()
    assert children(0, 3) == [1, 2] and children(0, 4) == [2, 1] and children(2, 4) == [3]


def seconds(size, radix, message, way, member=0):
    """Return when the last one below a member has the message that it sends, one child after another.

    `message` is the time of handling a message, and `way` how long it is on its way.
    """
    below = enumerate(children(member, size, radix), 1)
    return max(
        [number * message + way + seconds(size, radix, message, way, child) for number, child in below],
        default=0,
    )


def test_no_other_radix_is_faster_by_more_than_a_tenth_at_the_measured_times():
    results = json.loads((ROOT / "benchmarks" / "results" / "growth_machines.json").read_text())
    constants = results["extra"]["constants"]
    way = constants["round"] - constants["message"]
    times = constants["message"] / 2, way / 2  # one way of the two
    assert RADIX == 2
    for size in (4, 8, 16, 32, 64, 128, 256, 1024):
        own = constants["call"] + 2 * (seconds(size, 2, *times) - seconds(2, 2, *times))
        for radix in (3, 4, 8, 16, size):
            other = constants["call"] + 2 * (seconds(size, radix, *times) - seconds(2, 2, *times))
            assert own < 1.11 * other, (size, radix)
            if radix > 3 and size >= 16:
                assert own < other
