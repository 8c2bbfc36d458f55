"""Tests of how ended and stopped processes are detected, and how they are terminated."""

import multiprocessing
import os
import signal
import time

import psutil
import pytest

from synkhronos.transports import children

CONTEXT = multiprocessing.get_context("fork")


def start(target=time.sleep, *args):
    process = CONTEXT.Process(target=target, args=args or (60,))
    process.start()
    return process


def wait_until(condition, seconds=5):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.001)
    raise AssertionError("it never comes")


def test_the_cause_is_known_as_soon_as_a_death_is_detected():
    """A process closes its files, including its sentinel, shortly before it has an exit code."""
    for _ in range(30):
        process = start()
        os.kill(process.pid, signal.SIGKILL)
        while not (found := children.find_dead({1: process})):
            pass
        assert found == {1: "killed by SIGKILL"}
        process.close()


@pytest.mark.parametrize("code", [0, 1, 7])
def test_the_exit_code_is_reported_and_a_living_process_is_not(code):
    living, dead = start(), start(os._exit, code)
    try:
        assert wait_until(lambda: children.find_dead({0: living, 2: dead})) == {2: f"exit code {code}"}
    finally:
        children.kill_and_join([living, dead])


def test_a_worker_is_seen_dead_while_a_process_of_its_own_lives():
    """A child of the worker has inherited the sentinel, so it stays open."""

    def fork_and_wait(pid):
        child = os.fork()
        if child:
            pid.value = child
        time.sleep(60)

    pid = CONTEXT.Value("i", 0)
    process = start(fork_and_wait, pid)
    wait_until(lambda: pid.value)
    try:
        os.kill(process.pid, signal.SIGKILL)
        assert wait_until(lambda: children.find_dead({1: process})) == {1: "killed by SIGKILL"}
    finally:
        os.kill(pid.value, signal.SIGKILL)
        process.close()


def test_a_script_that_ignores_the_end_of_children_sees_a_death_and_can_end_the_rest():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        dead, living = start(), start()
        os.kill(dead.pid, signal.SIGKILL)
        (cause,) = wait_until(lambda: children.find_dead({1: dead, 2: living})).values()
        assert "exit code unknown" in cause
        children.kill_and_join([dead, living])
        assert not psutil.pid_exists(living.pid)
    finally:
        signal.signal(signal.SIGCHLD, before)
        # multiprocessing cannot detect that they have ended.
        multiprocessing.process._children -= {dead, living}


def test_stopped_processes_are_found_and_ended():
    running, stopped = start(), start()
    os.kill(stopped.pid, signal.SIGSTOP)
    pid = stopped.pid
    assert wait_until(lambda: children.find_stopped({3: running, 5: stopped})) == [5]
    children.kill_and_join([running, stopped])
    assert not psutil.pid_exists(pid)
