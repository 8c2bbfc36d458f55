"""Tests of semaphores in shared memory, between processes."""

import os
import signal
import time

import pytest

from synkhronos.transports.waiting import Semaphore
from synkhronos.stores.memory import SharedMemory


@pytest.fixture
def semaphore():
    return Semaphore(SharedMemory(1))


def test_what_is_posted_can_be_taken_once(semaphore):
    assert semaphore.try_wait()
    semaphore.post()
    semaphore.post()
    assert not semaphore.try_wait() and semaphore.wait(0)
    assert semaphore.try_wait() and not semaphore.wait(0)
    for _ in range(5):
        semaphore.post()
    semaphore.drain()
    assert semaphore.try_wait()


@pytest.mark.parametrize("seconds", [0.05, 0.95])
def test_a_wait_ends_when_its_time_is_up(semaphore, seconds):
    began = time.monotonic()
    assert semaphore.wait(seconds) is False
    assert seconds <= time.monotonic() - began < seconds + 2


def test_two_processes_answer_each_other(semaphore):
    memory = SharedMemory(1)
    there, back = Semaphore(memory), Semaphore(memory)
    child = os.fork()
    if not child:
        while there.wait(30):
            back.post()
        os._exit(0)
    try:
        for _ in range(200):
            there.post()
            assert back.wait(30)
        assert back.try_wait()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_signal_ends_a_wait_so_that_its_handler_runs(semaphore):
    def raise_it(*_):
        raise KeyError

    before = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        began = time.monotonic()
        with pytest.raises(KeyError):
            semaphore.wait(30)
            time.sleep(0)
        assert time.monotonic() - began < 10
    finally:
        signal.signal(signal.SIGALRM, before)


def test_the_last_of_several_processes_finds_all_increments():
    counter, children = Semaphore(SharedMemory(1)), []
    assert counter.read() == 0
    for _ in range(2):
        for _ in range(4):
            child = os.fork()
            if not child:
                for _ in range(1000):
                    counter.post()
                os._exit(0)
            children.append(child)
        while children:
            assert os.waitpid(children.pop(), 0)[1] == 0
        assert counter.read() == 4000
        counter.post()
        assert counter.read() == 4001
        counter.reset()
        assert counter.read() == 0
