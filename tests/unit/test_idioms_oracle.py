"""Each idiom of scripts, ported in each way, is equal to the serial function, or warned of, or refused.

The page "Checking results" says which.
"""

import re

import idioms
import pytest
from processes import ROOT

PAGE = ROOT / "docs" / "checking.rst"


def table():
    """Return the outcomes of each idiom, as the page shows them."""
    rows = re.findall(r"^   \* - (.+)\n     - (.+)\n     - (.+)\n     - (.+)$", PAGE.read_text(), re.M)
    return {name.replace("``", ""): tuple(outcomes) for name, *outcomes in rows[1:]}


SHOWN = table()


def outcomes(name):
    return tuple(idioms.outcome(idioms.IDIOMS[name], way) for way in idioms.WAYS)


def alone(shown):
    """Return what may come of an idiom on one rank, where nothing is divided."""
    if shown in (idioms.WARNED, idioms.RANDOM):
        return {idioms.EQUAL}
    return {shown, idioms.EQUAL} if shown == idioms.REFUSED else {shown}


def test_the_page_has_each_idiom():
    assert list(SHOWN) == [name.replace("``", "") for name in idioms.IDIOMS]


@pytest.mark.usefixtures("in_python", "in_threads")
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", idioms.IDIOMS)
def test_the_outcome_is_the_one_on_the_page(world_of, name, size):
    world_of(size, master_rank=size - 1)
    shown, found = SHOWN[name], outcomes(name)
    if size == 1:
        assert all(one in alone(each) for one, each in zip(found, shown)), (found, shown)
    else:
        assert found == shown
