"""Locks that a thread of the script holds while workers are forked."""

import _thread
import contextlib
import os
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from compilers import tt
from processes import own_process

import synkhronos as synk
from synkhronos.transports import local

RNG = np.random.default_rng(0)


@contextlib.contextmanager
def thread(work):
    """Do some work again and again in a thread, inside the block."""
    is_over = threading.Event()

    def run():
        while not is_over.is_set():
            work()

    running = threading.Thread(target=run, name="loader")
    running.start()
    try:
        yield
    finally:
        is_over.set()
        running.join()


def start(**kwargs):
    """Start two ranks with a function."""
    synk.fork(2, use_gpu=False, timeout=20, **kwargs)
    synk.function([], tt.constant(1.0) * 2)
    synk.distribute()


def draw(rank):
    return float(RNG.random()), float(np.random.random())


@own_process
def test_generators_that_a_thread_uses_are_not_locked_in_workers():
    def work():
        RNG.standard_normal(300_000)
        np.random.standard_normal(300_000)

    with warnings.catch_warnings(), thread(work):
        warnings.simplefilter("ignore", synk.SynkhronosWarning)
        for _ in range(8):
            start()
            assert len(synk.spmd(draw)) == 2
            synk.close()


@own_process
def test_a_start_with_other_threads_warns_once():
    with thread(lambda: time.sleep(0.01)):
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                start()
            assert len(caught) == 1 and "other threads run" in str(caught[0].message)
            assert "loader" in str(caught[0].message) and caught[0].filename == __file__
            synk.function([], tt.constant(1.0) * 3)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                synk.distribute()
            assert not caught
            synk.close()
    start()


@own_process
def test_a_foreign_thread_that_has_ended_is_no_reason_to_warn():
    known, is_over = [], threading.Event()

    def work():
        known.append(threading.current_thread())  # registers it
        is_over.wait()

    number = _thread.start_new_thread(work, ())
    while not known:
        time.sleep(1e-3)
    with pytest.warns(synk.SynkhronosWarning, match=known[0].name):
        start()
    synk.close()
    is_over.set()
    while number in sys._current_frames():
        time.sleep(1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start()


@pytest.mark.parametrize("timeout", [1, None])
def test_a_worker_that_does_not_start_is_named(programs, timeout):
    done = programs.run(never_start, timeout)
    assert done.returncode == 0 and done.stdout == "restarted: 2\n", done


def never_start(timeout):
    local._START = 1.0
    locked = threading.Lock()
    synk.fork(2, use_gpu=False, timeout=timeout)
    synk.function([], tt.constant(1.0) * 2)
    with locked:
        os.register_at_fork(after_in_child=lambda: locked.acquire(timeout=60))
        with pytest.raises(synk.WorldBrokenError, match="rank 1 has not started within 1 seconds"):
            synk.distribute()
    print("restarted:", synk.restart())
    synk.distribute()
