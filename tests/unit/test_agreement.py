"""Tests of what is known about replicas when functions update many variables from each other."""

import pytest

from synkhronos.functions.agreement import Agreement

COUNT = 40  # as many as a network has parameters and velocities; there are 40! paths among them


class Counted(dict):
    """Sources that may be looked up so many times."""

    left = 100 * COUNT

    def get(self, *arguments):
        self.left -= 1
        assert self.left, "it takes one path after the other"
        return super().get(*arguments)


@pytest.fixture
def agreement():
    """Every variable is computed from all of them, and from no rows."""
    made = Agreement()
    made.updated_from({number: (False, set(range(COUNT))) for number in range(COUNT)})
    made.sources = Counted(made.sources)
    return made


def test_many_variables_that_depend_on_each_other_are_followed_once(agreement):
    assert not agreement.is_stale(0) and not agreement.differs_by_calls(0)
    agreement.stale.add(COUNT - 1)
    assert agreement.is_stale(0)
    agreement.combined.update(range(1, COUNT - 1))
    assert agreement.is_stale(0), "a value that is stale, too, although it was combined once"
    agreement.sources[0] = {(False, frozenset(range(COUNT - 1)))}
    assert not agreement.is_stale(0), "only by way of combined values"
    agreement.scattered.add(COUNT - 1)
    assert agreement.differs_by_calls(1) and not agreement.differs_by_calls(0)


def test_rows_are_found_however_far_they_are():
    agreement = Agreement()
    agreement.updated_from({number: (False, {number, number + 1}) for number in range(2000)})
    assert not agreement.differs_by_calls(0) and not agreement.is_stale(0)
    agreement.updated_from({2000: (True, set())})
    agreement.stale.add(2000)
    assert agreement.differs_by_calls(0) and agreement.is_stale(0)


def test_dropped_variables_leave_their_effects(agreement):
    agreement.stale.add(3)
    agreement.scattered.add(4)
    agreement.forget([3, 4])
    assert agreement.stale == set(range(COUNT)) - {3, 4}
    assert all(
        sources == {(True, frozenset(range(COUNT)) - {3, 4})} for sources in agreement.sources.values()
    )
