"""Tests of the selection of the quick tests."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from quick import CASES, quick, spread


class Item:
    """What the selection uses of a test."""

    def __init__(self, folder, marks=(), name="test_it", **params):
        self.path = Path("tests", folder, "test_file.py")
        self.originalname, self.marks = name, marks
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return name if name in self.marks else None


@pytest.mark.parametrize(
    "number, chosen", [(1, [0]), (2, [0, 6]), (3, [0, 3, 6]), (7, [*range(7)]), (9, [*range(7)])]
)
def test_cases_are_spread(number, chosen):
    assert spread(range(7), number) == chosen


def test_some_cases_of_each_unit_test_are_quick():
    items = [Item("unit", case=number) for number in range(100)]
    assert quick(items) == {items[0], items[49], items[99]}
    others = [Item("unit", case=number, name="test_another") for number in range(2)]
    assert quick([*items, *others]) == {*quick(items), *others}


def test_every_check_of_a_contract_is_quick():
    items = [Item("contract", check=check, size=size) for check in "abcd" for size in range(5)]
    assert len(quick(items)) == 4 * CASES
    assert {item.callspec.params["check"] for item in quick(items)} == {*"abcd"}


def test_of_other_tests_one_case_of_those_with_the_mark_is_quick():
    items = [Item("system", ["quick"], case=number) for number in range(4)]
    assert quick([*items, Item("system"), Item("faults")]) == {items[0]}


def test_no_slow_test_is_quick():
    slow = [Item("unit", ["slow"]), Item("system", ["quick", "slow"])]
    assert quick(slow) == set()
