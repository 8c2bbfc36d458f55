"""Tests of how long a waiting rank polls before it sleeps."""

import threading
import time

import pytest

from synkhronos.transports import waiting
from synkhronos.transports.waiting import AFTER_MOVE, LEAST, LONGEST, SHARE, SHORTEST, SpinPolicy


class Clock:
    """A clock that advances by a microsecond per reading, with a semaphore posted at a given time."""

    def __init__(self, posted):
        self.now, self.posted = 100.0, posted

    def monotonic(self):
        self.now += 1e-6
        return self.now

    def try_wait(self):
        self.now += 1e-7
        return int(self.now - 100 < self.posted)


@pytest.fixture
def poll(monkeypatch):
    """Function that polls, and returns whether it succeeded, and how long it took."""

    def poll(patience, worked, posted, when_idle=None):
        clock = Clock(posted)
        monkeypatch.setattr(waiting, "time", clock)
        success = patience.poll(clock.try_wait, 100.0, worked, when_idle)
        return success, clock.now - 100

    return poll


@pytest.mark.parametrize(
    "worked, limit",
    [(0, SHORTEST), (1e-6, SHORTEST), (8e-3, SHARE * 8e-3), (0.1, SHARE * 0.1), (60, LONGEST)],
)
def test_the_limit_is_a_share_of_the_work_between_two_bounds(poll, worked, limit):
    assert SpinPolicy.limit(worked) == pytest.approx(limit)
    success, took = poll(SpinPolicy(), worked, posted=1)
    assert success is False and limit <= took < limit + 1e-4
    success, took = poll(SpinPolicy(), worked, posted=limit / 2)
    assert success is True and took < limit / 2 + 1e-4


def test_a_rank_that_has_polled_in_vain_polls_half_as_long_the_next_time(poll):
    patience = SpinPolicy()
    times = []
    for _ in range(10):
        success, took = poll(patience, worked=0.1, posted=1)
        assert not success
        patience.learn(worked=0.1, waited=1)
        times.append(took / (SHARE * 0.1))
    expected = [max(0.5**k, LEAST) for k in range(10)]
    assert times == pytest.approx(expected, rel=0.05)


def test_other_threads_run_while_a_rank_polls():
    counted, ended = [0], threading.Event()

    def count():
        while not ended.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = counted[0]
        SpinPolicy().poll(lambda: 1, time.monotonic(), worked=60)
        assert counted[0] > before
    finally:
        ended.set()
        thread.join()


def test_a_rank_that_has_left_the_core_of_another_one_polls_for_longer_once(poll):
    asked = []
    patience = SpinPolicy(leave_core=lambda: asked.append(1) or True)
    for _ in range(10):
        patience.learn(worked=0, waited=1, has_core=False)
    patience.learn(worked=0, waited=1, has_core=False)
    assert not asked and patience.fraction == LEAST
    patience.learn(worked=0, waited=1)
    assert asked and patience.fraction == AFTER_MOVE
    assert poll(patience, worked=0, posted=0.9 * AFTER_MOVE * SHORTEST)[0]
    assert not poll(patience, worked=0, posted=1.1 * SHORTEST)[0]
    patience.learn(worked=0, waited=1)
    success, took = poll(patience, worked=60, posted=1)
    assert not success and took == pytest.approx(LONGEST, rel=0.01)


def test_a_wait_after_long_work_calls_when_idle_once(poll):
    calls = []
    patience = SpinPolicy()

    def note():
        calls.append(None)

    poll(patience, worked=0.1, posted=1e-6, when_idle=note)  # has ended before
    poll(patience, worked=1e-4, posted=1e-4, when_idle=note)  # the caches still have everything
    assert not calls
    assert poll(patience, worked=0.1, posted=2e-2, when_idle=note)[0]
    assert len(calls) == 1
    assert not poll(patience, worked=0.1, posted=1, when_idle=note)[0]
    assert len(calls) == 2
