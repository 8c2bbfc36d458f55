"""Leaders that end a command without coming to a meeting at which others wait."""

import pytest

from synkhronos.machines.leaders import ASK, ENDED, EndedLeaders


class Leaders:
    """What several leaders know of each other, and the notices that they have sent."""

    def __init__(self, size):
        self.sent = []
        self.leaders = [EndedLeaders(self._sender(number)) for number in range(size)]

    def _sender(self, number):
        def notify(kind, passed, to=None):
            self.sent.append((kind, number, passed))
            for other in range(len(self.leaders)) if to is None else to:
                if other != number:
                    self.leaders[other].take(kind, number, passed)

        return notify


@pytest.mark.parametrize("asks_first", [False, True])
def test_a_leader_that_has_ended_is_found_by_those_that_wait(asks_first):
    both = Leaders(3)
    waiting, ended, _ = both.leaders
    for step in (lambda: waiting.ask(2), lambda: ended.end(2))[:: 1 if asks_first else -1]:
        assert waiting.find(2) is None
        step()
    assert waiting.find(2) == 1 and waiting.find(1) is None


def test_a_leader_that_has_passed_the_meeting_is_not_absent():
    both = Leaders(2)
    waiting, ended = both.leaders
    waiting.ask(2)
    ended.end(3)
    assert waiting.find(2) is None
    waiting.ask(3)  # its next meeting
    assert waiting.find(3) == 1


def test_nothing_is_sent_unless_a_leader_asks_and_it_asks_once_in_a_meeting():
    both = Leaders(2)
    waiting, ended = both.leaders
    ended.end(0)
    assert both.sent == []
    for passed in (0, 0, 1, 1):
        waiting.ask(passed)
    assert both.sent == [(ASK, 0, 0), (ENDED, 1, 0), (ASK, 0, 1), (ENDED, 1, 0)]


def test_a_command_begins_without_what_is_known_of_the_last_one():
    both = Leaders(2)
    waiting, ended = both.leaders
    waiting.ask(0)
    ended.end(0)
    for one in both.leaders:
        one.begin()
    assert waiting.find(0) is None
    waiting.ask(0)
    assert waiting.find(0) is None  # the other one is still in the new command
