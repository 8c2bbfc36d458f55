"""Tests of slow ranks, too few cores, and migration: correct results, and waiting without CPU use."""

import contextlib
import itertools
import multiprocessing
import os
import threading
import time

import numpy as np
import psutil
import pytest
from compilers import Apply, Op, compiler, tt

import synkhronos as synk

CORES = sorted(os.sched_getaffinity(0))


class Work(Op):
    """Returns the sum of its input in seconds, after computing or sleeping for that time."""

    __props__ = ("busy",)

    def __init__(self, busy):
        self.busy = busy

    def make_node(self, x):
        return Apply(self, [x], [tt.dscalar()])

    def perform(self, node, inputs, outputs):
        seconds = inputs[0].sum()
        if not self.busy:
            time.sleep(seconds)
        end = time.thread_time() + seconds * self.busy
        while time.thread_time() < end:
            pass
        outputs[0][0] = np.asarray(seconds)


def cpu_seconds(rank):
    """Return the CPU time of this rank, which may be on another machine."""
    return time.process_time()


class Ranks:
    """Functions that take a given time on each rank, and the CPU time that each rank has used."""

    def __init__(self):
        x = tt.dvector("x")
        self.total = compiler.shared(np.zeros(()), "total")
        self.work = {
            kind: synk.function(
                [x], (Work(kind == "busy")(x), "sum"), updates=[(self.total, self.total + x.sum())]
            )
            for kind in ("busy", "asleep")
        }
        synk.distribute()
        workers = {child.name: child.pid for child in multiprocessing.active_children()}
        self.size = synk.world.world.current_world().size
        for work in self.work.values():
            work(np.zeros(self.size))  # Numba compiles in the first call
        pids = [workers.get(f"synkhronos-{rank}", os.getpid()) for rank in range(self.size)]
        self.processes = [psutil.Process(pid) for pid in pids]

    def used(self):
        """Return the CPU time of each rank so far, in seconds."""
        return np.array(synk.spmd(cpu_seconds))

    def pin(self, cores):
        for process in self.processes:
            process.cpu_affinity(list(cores))

    @contextlib.contextmanager
    def no_burning(self, own):
        """Check that ranks use little CPU time in a ``with`` block, apart from their `own` work."""
        before, began = self.used(), time.perf_counter()
        yield
        waited = time.perf_counter() - began
        used = self.used() - before - own
        assert (used <= 0.15 * waited + 0.1).all(), f"beyond their work {used} s of {waited} s"


@pytest.fixture
def ranks_of(world_of):
    """Function that opens a world of the given size, and returns a `Ranks`."""

    def open_it(size):
        world_of(size)
        return Ranks()

    try:
        yield open_it
    finally:
        os.sched_setaffinity(0, CORES)


@pytest.mark.parametrize("kind", ["busy", "asleep"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("slow", [0, 1], ids=["slow master", "slow worker"])
def test_ranks_that_wait_for_a_slower_one_use_no_processor_time(ranks_of, size, slow, kind):
    ranks = ranks_of(size)
    seconds = np.full(size, 0.004)
    seconds[slow] *= 10
    work = ranks.work[kind]
    with ranks.no_burning(20 * seconds * (kind == "busy")):
        for turn in range(10):
            assert work(seconds) == pytest.approx(seconds.sum())
            with synk.fuse():
                work(seconds)
                synk.all_reduce(ranks.total, "sum")
                value = synk.get_value(size - 1, ranks.total)
            assert value.result() == pytest.approx(expected(turn, seconds))


def expected(turn, seconds):
    """Return the total after a number of turns, each with two calls and a sum over the ranks."""
    totals = np.zeros(len(seconds))
    for _ in range(turn + 1):
        totals[:] = (totals + 2 * seconds).sum()
    return totals[0]


def test_eight_ranks_on_two_cores_compute_correctly_and_sleep_while_waiting(ranks_of):
    ranks = ranks_of(8)
    ranks.pin(CORES[:2])
    seconds = np.full(8, 0.001)
    seconds[5] = 0.5
    with ranks.no_burning(seconds + 0.2):  # 0.2 is for the calls and reductions below
        assert ranks.work["busy"](seconds) == pytest.approx(seconds.sum())
        for _ in range(100):
            assert ranks.work["busy"](np.zeros(8)) == 0
            synk.all_reduce(ranks.total, "max")
    assert synk.get_value(7, ranks.total) == 0.5
    with ranks.no_burning(0):
        time.sleep(1)  # the master is idle, so the workers must be too


def test_ranks_that_are_moved_between_cores_while_they_run_compute_correctly(ranks_of):
    ranks = ranks_of(3)
    choices = itertools.cycle([CORES[:1], CORES, CORES[-1:], CORES[:2]])
    done = threading.Event()

    def move():
        while not done.is_set():
            for process in ranks.processes:
                process.cpu_affinity(next(choices))
            next(choices)
            time.sleep(0.003)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        seconds = np.array([0.0001, 0.0003, 0.0002])
        total = 0
        for _ in range(300):
            assert ranks.work["busy"](seconds) == pytest.approx(seconds.sum())
            synk.all_reduce(ranks.total, "avg")
            total += seconds.mean()
    finally:
        done.set()
        mover.join()
    for rank in range(3):
        assert synk.get_value(rank, ranks.total) == pytest.approx(total)
