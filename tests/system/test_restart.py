"""Tests of restart(): the same objects continue to work with new workers."""

import functools
import gc
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest
from compilers import RandomStreams, Streams, compiler, tt
from prelude import check_in_fork, error_of, later
from processes import own_process

import synkhronos as synk


def kill(rank, number=signal.SIGKILL):
    """Send a signal to a worker."""
    workers = {one.name: one.pid for one in multiprocessing.active_children()}
    os.kill(workers[f"synkhronos-{rank}"], number)


def lose(rank, call):
    """Kill a worker, and check that a call reports its death."""
    kill(rank)
    error = error_of(call)
    assert type(error) is synk.WorldBrokenError, repr(error)
    assert f"rank {rank} (killed by SIGKILL)" in str(error) and "restart()" in str(error)


class Opened:
    """A world with one function `step`, which takes a matrix.

    It adds the sum of the rows to `w`, which is zero first, and returns this sum and the first column.
    """

    def __init__(self, n=2, **kwargs):
        synk.fork(n, use_gpu=False, **kwargs)
        self.x = x = tt.dmatrix("x")
        self.w = compiler.shared(np.zeros(2), "w")
        self.step = synk.function(
            [x], [(x.sum(axis=0), "sum"), (x[:, 0], "gather")],
            updates=[(self.w, self.w + x.sum(axis=0))], name="step", mode="FAST_COMPILE",
        )  # fmt: skip
        synk.distribute()

    def check(self, n, data):
        """Check that every rank computes on its own rows, and updates its own replica."""
        before = self.w.get_value()
        total, firsts = self.step(data)
        assert total.tolist() == data.data.sum(axis=0).tolist()
        assert firsts.tolist() == data.data[:, 0].tolist()
        shares = np.array_split(data.data, n)
        assert synk.gather(self.w).tolist() == [(before + one.sum(axis=0)).tolist() for one in shares]
        synk.all_reduce(self.w)  # moves the replicas to shared memory


def open_world(n=2, **kwargs):
    """Return an `Opened`. Keyword arguments are passed to ``fork()``."""
    return Opened(n, **kwargs)


@own_process
@pytest.mark.parametrize("n, master_rank, lost", [(2, 0, 1), (2, 1, 0), (3, 1, 2)])
def test_the_same_objects_go_on_after_a_death(n, master_rank, lost):
    world = open_world(n, master_rank=master_rank)
    x, w, step = world.x, world.w, world.step
    rows = np.arange(14.0).reshape(7, 2)
    np.save("rows.npy", rows)
    data, mapped = synk.data(rows), synk.data(np.load("rows.npy", mmap_mode="r"))
    (bound,) = step.set_input_shmems(rows)
    view = data.data
    world.check(n, data)
    for _ in range(3):
        lose(lost, lambda: step(data))
        assert synk.restart() == n
        kept = w.get_value()
        assert synk.gather(w).tolist() == [kept.tolist()] * n
        view[2] += 1  # still the memory of `data`
        assert synk.get_shmems(x) is bound and bound.data.tolist() == rows.tolist()
        for one in (data, mapped):
            world.check(n, one)
        assert step()[1].tolist() == rows[:, 0].tolist()
        assert step(data, batch=[0, 6, 2, 2])[1].tolist() == [0, 12, view[2, 0], view[2, 0]]
        data.set_length(9)
        data.set_length(7)
        view = data.data
        extra = synk.function([x], ((x * w).sum(), "sum"), mode="FAST_COMPILE")
        synk.broadcast(w)
        assert np.allclose(extra(data), (view * w.get_value()).sum())
    synk.close()
    assert w.get_value().shape == (2,)


@own_process
def test_the_number_of_processes_may_change_up_to_that_of_fork():
    world = open_world(3, master_rank=2)
    w, step = world.w, world.step
    data = synk.data(np.arange(14.0).reshape(7, 2))
    world.check(3, data)
    step(data)  # so that the calls below are repeated ones
    for n in (1, 2, 3, 1, 3):
        assert synk.restart(n) == n
        assert len(multiprocessing.active_children()) == 0  # workers start when they are needed
        step(data)
        assert len(multiprocessing.active_children()) == n - 1
        synk.broadcast(w)
        world.check(n, data)
        assert synk.get_lengths(w) == [2] * n
    lose(1, lambda: step(data))
    assert synk.restart(1) == 1
    world.check(1, data)
    for wrong in (0, 4, -1):
        error = error_of(functools.partial(synk.restart, wrong))
        assert type(error) is ValueError and "expected 1 to 3" in str(error)
    for wrong in (True, 2.0, "2"):
        assert type(error_of(functools.partial(synk.restart, wrong))) is TypeError
    world.check(1, data)


@own_process
def test_a_rank_without_rows_of_its_own_is_noticed_after_a_restart():
    world = open_world(2, master_rank=0)
    x, w, step = world.x, world.w, world.step
    own = synk.function([x], (x[0, 0], None), mode="FAST_COMPILE")
    one = synk.data(np.ones((1, 2)))
    assert own(one) == 1
    synk.restart(1)
    synk.restart(2)
    assert own(one) == 1
    # A reduction is weighted by the rows of calls since the restart.
    step(one)
    synk.all_reduce(w, weights=step)
    synk.restart()
    error = error_of(lambda: synk.all_reduce(w, weights=step))
    assert type(error) is ValueError, repr(error)
    assert "weights of all ranks are zero" in str(error), error
    step(synk.data(np.ones((3, 2))))
    synk.all_reduce(w, weights=step)


@own_process
def test_what_is_not_possible_is_refused_and_changes_nothing():
    assert type(error_of(synk.restart)) is synk.NotForkedError
    world = open_world(2)
    data = synk.data(np.ones((4, 2)))
    with synk.fuse():
        error = error_of(synk.restart)
        assert type(error) is RuntimeError and "fuse()" in str(error)
    with synk.profile():
        error = error_of(synk.restart)
        assert type(error) is RuntimeError and "profile()" in str(error)
    world.check(2, data)

    def restart_in_child():
        error = error_of(synk.restart)
        assert type(error) is RuntimeError and "forked from the master" in str(error), repr(error)

    check_in_fork(restart_in_child)
    world.check(2, data)
    synk.close()
    assert type(error_of(synk.restart)) is synk.ClosedError


@own_process
def test_a_death_inside_fuse_or_profile_can_be_followed_by_a_restart():
    world = open_world(2)
    w, step = world.w, world.step
    data = synk.data(np.ones((4, 2)))

    def fused():
        with synk.fuse():
            step(data)
            synk.all_reduce(w)

    def profiled():
        with synk.profile():
            step(data)

    for call in (fused, profiled):
        lose(1, call)
        synk.restart()
        synk.broadcast(w)
        world.check(2, data)
        call()
        synk.broadcast(w)


@own_process
def test_a_restart_needs_neither_functions_nor_started_workers():
    synk.fork(2, use_gpu=False)
    assert synk.restart() == 2 and synk.restart(1) == 1 and synk.restart(2) == 2
    data = synk.data(np.ones((4, 2)))
    s = compiler.shared(2.0)
    x = tt.dmatrix()
    f = synk.function([x], (x.sum() * s, "sum"), mode="FAST_COMPILE")
    synk.restart()
    assert f(data) == 16
    synk.restart()
    s.set_value(3.0)  # in the master only, but the workers start later and inherit it
    assert f(data) == 24


@own_process
def test_a_stopped_worker_or_an_interrupted_command_can_be_followed_by_a_restart():
    world = open_world(2, timeout=0.7)
    w, step = world.w, world.step
    data = synk.data(np.ones((4, 2)))
    kill(1, signal.SIGSTOP)
    error = error_of(lambda: step(data))
    assert type(error) is synk.WorldBrokenError and "timeout" in str(error)
    synk.restart()
    world.check(2, data)
    synk.restart()
    # Ctrl-C while the master waits for a rank that does not respond.
    step(data)
    kill(1, signal.SIGSTOP)
    later(0.3, os.kill, os.getpid(), signal.SIGINT)
    assert type(error_of(lambda: step(data))) is KeyboardInterrupt
    assert type(error_of(lambda: step(data))) is synk.WorldBrokenError
    synk.restart()
    synk.broadcast(w)
    world.check(2, data)


@own_process
def test_workers_that_cannot_be_forked_are_an_error_and_tried_again_by_the_next_call():
    world = open_world(3)
    data = synk.data(np.ones((6, 2)))
    lose(1, lambda: world.step(data))
    synk.restart()
    fork, calls = os.fork, []

    def failing():
        calls.append(1)
        if len(calls) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    os.fork = failing
    error = error_of(lambda: world.step(data))
    assert type(error) is synk.SynkhronosError and "could be started" in str(error), repr(error)
    assert len(multiprocessing.active_children()) == 0
    world.check(3, data)


@own_process(timeout=120)
def test_an_interrupted_step_was_taken_completely_or_not_at_all():
    """Rank 1 is killed at 16 moments of two steps of gradient, all-reduce and update."""
    synk.fork(2, use_gpu=False)
    x = tt.dmatrix("x")
    w, count = compiler.shared(np.zeros(1_000_000), "w"), compiler.shared(np.int64(0), "count")
    flat = compiler.shared(np.zeros(1_000_000), "flat")
    gradient = synk.function([x], updates=[(flat, tt.ones_like(w) * x.sum() / x.shape[0])])
    update = synk.function([], updates=[(w, w + flat), (count, count + 1)])
    data = synk.data(np.ones((5, 1)))

    def take_a_step():
        with synk.fuse():
            gradient(data)
            synk.all_reduce(flat, weights=gradient)
            update()

    take_a_step()
    began = time.monotonic()
    take_a_step()
    seconds = time.monotonic() - began
    taken = 2
    for moment in range(16):
        threading.Timer(moment / 8 * seconds, kill, (1,)).start()
        try:
            for _ in range(10_000):
                take_a_step()
                taken += 1
        except synk.WorldBrokenError:
            pass
        synk.restart()
        values = np.unique(w.get_value(borrow=True))
        assert values.tolist() == [float(count.get_value())], values  # no step was half taken
        assert count.get_value() - taken in (0, 1)
        taken = int(count.get_value())
        take_a_step()
        taken += 1
        assert synk.get_value(1, count) == taken


def print_drawn(make, interrupted):
    """Draw random numbers several times; print the last ones, drawn after a restart if interrupted."""
    n = 3
    synk.fork(n, use_gpu=False)
    x = tt.dmatrix("x")
    draw = synk.function([x], (make(5).uniform(size=(x.shape[0], 3)), "gather"), mode="FAST_COMPILE")
    draw(np.ones((3 * n, 1)))
    draw(np.ones((3 * n, 1)))
    if interrupted:
        lose(1, lambda: draw(np.ones((n, 1))))  # the master has drawn its share
        synk.restart()
    else:
        draw(np.ones((n, 1)))
    rows = draw(np.ones((3 * n, 1)))
    assert len(np.unique(rows)) == rows.size
    print(rows.tolist())


def test_with_equal_shares_mrg_streams_go_on_as_if_nothing_had_happened(programs):
    whole, restarted = (
        programs.run(print_drawn, Streams, interrupted).check().stdout for interrupted in (False, True)
    )
    assert whole == restarted


def test_streams_of_numpy_are_independent_after_a_restart(programs):
    programs.run(print_drawn, RandomStreams, True).check()


@pytest.mark.slow
@own_process
def test_thirty_restarts_leak_neither_files_nor_memory():
    world = open_world(2)
    step = world.step
    big = compiler.shared(np.zeros(1 << 20), "big")
    touch = synk.function([], updates=[(big, big + 1)], mode="FAST_COMPILE")
    data = synk.data(np.ones((1 << 17, 2)))
    process = psutil.Process()

    def state():
        gc.collect()
        maps = process.memory_maps(grouped=False)
        return process.num_fds(), process.memory_full_info().rss, process.num_threads(), len(maps)

    def play(number):
        touch()
        synk.all_reduce(big)
        step(data)
        if number % 2:
            lose(1, lambda: step(data))
        synk.restart()

    for number in range(4):
        play(number)
    files, memory, threads, maps = state()
    for number in range(30):
        play(number)
    files_after, memory_after, threads_after, maps_after = state()
    assert files_after <= files, (files, files_after)
    assert threads_after <= threads
    assert maps_after <= maps + 5, (maps, maps_after)
    # A leak of the variable in each round would be 250 MB.
    assert memory_after - memory < 24 << 20, (memory_after - memory) >> 10
    assert big.get_value()[0] == 34
    kinds = [type(one).__name__ for one in gc.get_objects()]
    assert kinds.count("World") == kinds.count("LocalTransport") == kinds.count("SharedMemory") == 1
