"""Tests of failing processes, each in a separate process. `faults/` tests all combinations."""

import faulthandler
import functools
import gc
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import psutil
import pytest
from compilers import compiler, tt
from prelude import (
    DOZE, EXIT, KILL, NOTHING, RAISE, SLEEP, WorkerTrouble, all_gone_within, check_in_fork, error_of,
    gone, interrupt, later, open_world,
)  # fmt: skip
from processes import own_process

import synkhronos as synk


@own_process
def test_an_exception_in_a_worker_becomes_a_worker_error_and_the_world_goes_on():
    world = open_world()
    for _ in range(3):
        error = error_of(lambda: world.act(NOTHING, RAISE))
        assert type(error) is synk.WorkerError, repr(error)
        assert error.rank == 1 and error.type_name == "WorkerTrouble"
        assert "it went wrong in here" in error.message
        assert "in raise_trouble" in error.traceback and "in raise_trouble" in str(error)
        assert "rank 1" in str(error) and "WorkerTrouble" in str(error)
        world.check_usable()
    error = error_of(lambda: world.act(RAISE, NOTHING))  # raised by the master itself
    assert type(error) is WorkerTrouble
    world.check_usable()
    error = error_of(lambda: world.act(RAISE, RAISE))
    assert type(error) is WorkerTrouble
    world.check_usable()

    # The message for an error of Theano's names its class.
    x, y = tt.dvector(), tt.dvector()
    unequal = synk.function([x], (x + y, "gather"), [y], mode="FAST_COMPILE")
    error = error_of(lambda: unequal(np.ones(3), np.ones(2)))  # rank 1 has one row of `x`, not two
    assert type(error) is synk.WorkerError and error.type_name == "ValueError", repr(error)
    words = "mismatch|incompatible shape|Runtime broadcasting not allowed"
    assert re.search(words, str(error)), str(error)
    world.check_usable()


@own_process
@pytest.mark.parametrize("master_rank", [0, 2])
def test_an_exception_before_a_collective_makes_the_others_leave_it(master_rank):
    world = open_world(3, master_rank=master_rank)
    for rank in range(3):
        numbers = [NOTHING] * 3
        numbers[rank] = RAISE
        error = error_of(functools.partial(world.fused, *numbers))
        if rank == master_rank:
            assert type(error) is WorkerTrouble
        else:
            assert type(error) is synk.WorkerError and error.rank == rank, repr(error)
            assert error.type_name == "WorkerTrouble"
        world.check_usable()
    error = error_of(lambda: world.fused(RAISE, RAISE, RAISE))
    assert type(error) is WorkerTrouble
    world.check_usable()
    error = error_of(lambda: world.fused(SLEEP, RAISE, NOTHING))  # rank 0 arrives after the failure
    assert error.rank == 1
    world.check_usable()


@own_process
def test_a_worker_that_dies_while_the_master_computes_is_found():
    world = open_world()
    world.check_broken(error_of(lambda: world.act(SLEEP, KILL), 3), "rank 1", "SIGKILL")
    world = open_world(3)  # if two workers die at once, both are named
    error = error_of(lambda: world.act(SLEEP, KILL, EXIT), 3)
    world.check_broken(error, "rank 1", "SIGKILL", "rank 2", "exit code 7")


@own_process
def test_a_worker_that_dies_idle_does_not_disturb_close():
    world = open_world()
    (worker,) = world.workers()
    os.kill(worker, signal.SIGKILL)
    assert all_gone_within([worker], 2)
    began = time.monotonic()
    synk.close()
    assert time.monotonic() - began < 2
    open_world().check_usable()


@own_process
def test_idle_time_does_not_count_towards_the_timeout():
    world = open_world(timeout=1)
    time.sleep(1.5)
    world.check_usable()


@pytest.mark.slow
@own_process
def test_a_pause_of_the_whole_script_does_not_count_towards_the_timeout():
    """The script is stopped and continued, as by Ctrl-Z and ``fg`` in a terminal."""
    world = open_world(3, timeout=2)
    group = os.getpgrp()
    for numbers in ([NOTHING, NOTHING, DOZE], [DOZE, NOTHING, NOTHING]):
        began = time.monotonic()
        pause = f"sleep 0.3; kill -STOP -{group}; sleep 2.5; kill -CONT -{group}"
        with subprocess.Popen(["sh", "-c", pause], start_new_session=True):
            world.fused(*numbers)
        assert time.monotonic() - began > 2.5
        world.check_usable()


# Ctrl-C. During a command, the first one is deferred until the command has ended on every rank, and the
# world stays usable. A second one breaks the world and ends the workers.


def check_in_step(world, error, workers):
    """Check that the error is KeyboardInterrupt, and that the world is usable with the same workers."""
    assert type(error) is KeyboardInterrupt, repr(error)
    world.check_usable()
    assert world.workers() == workers


@own_process
def test_ctrl_c_at_any_moment_of_short_calls_leaves_the_world_in_step():
    """Send one Ctrl-C at a time, at random moments in a call, in a collective, or in between."""
    world = open_world()
    workers = world.workers()
    moments = np.random.RandomState(0).uniform(0, 0.05, 20)

    def work(moment):
        later(moment, interrupt)
        began = time.monotonic()
        while True:
            assert world.plain(np.ones(4)) == [10]
            synk.broadcast(world.w, np.arange(3.0))
            if time.monotonic() > began + 1:
                interrupt()  # Python drops what is raised in the callback of a weakref, between calls

    for moment in moments:
        check_in_step(world, error_of(functools.partial(work, moment), 3), workers)


def use_and_end():
    open_world(3).check_usable()


def fork_and_end():
    synk.fork(2, use_gpu=False)  # the worker is not started yet


@pytest.mark.parametrize("program", [use_and_end, fork_and_end])
def test_a_script_need_not_close(programs, program):
    programs.run(program).check()


def end_with_an_exception():
    open_world().check_usable()
    raise LookupError("lost")


def end_with_3():
    open_world()
    sys.exit(3)


def test_an_exception_at_top_level_ends_the_script_with_1(programs):
    done = programs.run(end_with_an_exception)
    assert done.returncode == 1
    assert "LookupError: lost" in done.stderr
    assert programs.run(end_with_3).returncode == 3


@own_process
def test_close_too_early_or_twice_warns():
    def warned():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            synk.close()
        return [one.category for one in caught]

    assert warned() == [RuntimeWarning]
    assert type(error_of(synk.distribute)) is synk.NotForkedError
    world = open_world()
    assert warned() == []
    assert warned() == [RuntimeWarning]
    assert type(error_of(synk.distribute)) is synk.ClosedError
    assert type(error_of(lambda: world.plain(np.ones(2)))) is synk.ClosedError


def raise_value_error():
    raise ValueError("of the child")


@own_process
@pytest.mark.parametrize(
    "end", [sys.exit, functools.partial(os._exit, 0), raise_value_error], ids=["exit", "_exit", "raise"]
)
def test_the_end_of_a_forked_child_does_not_touch_the_parents_world(end):
    world = open_world()
    workers = world.workers()
    faulthandler.cancel_dump_traceback_later()  # or the child waits at exit for this timer's thread
    child = os.fork()
    if not child:
        end()
    os.waitpid(child, 0)
    time.sleep(0.2)
    assert not any(map(gone, workers))
    world.check_usable()


@own_process
def test_a_child_of_the_script_cannot_command_the_workers():
    world = open_world()

    def call_all():
        for call in (lambda: world.plain(np.ones(2)), synk.distribute, lambda: synk.all_reduce(world.w)):
            error = error_of(call)
            assert type(error) is synk.WorldBrokenError, repr(error)
            assert "forked from the master" in str(error)
            assert "the world is not broken: compute in the master" in str(error)

    check_in_fork(call_all)
    world.check_usable()


@own_process
def test_a_world_has_no_file_in_dev_shm():
    """There is no temporary file either. A process killed before removing one would leave it behind."""
    world = open_world(3)
    big = np.ones(1 << 18)
    data = synk.data(big)
    assert world.plain(data) == [len(big) + 9]
    synk.broadcast(world.w, big)
    synk.all_reduce(world.w)
    assert len(synk.get_value(1, world.w)) == len(big)
    for pid in world.pids():
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "/dev/shm" not in mapped and "(deleted)" in mapped  # the anonymous mapping
        assert not [one for one in psutil.Process(pid).open_files() if "/dev/shm" in one.path]


@own_process
def test_ten_rounds_of_fork_and_close_leak_neither_files_nor_memory():
    process = psutil.Process()

    def state():
        maps = process.memory_maps(grouped=False)
        return process.num_fds(), process.memory_info().rss, process.num_threads(), len(maps)

    def play():
        world = open_world()
        data = synk.data(np.ones(1 << 20))
        assert world.plain(data) == [(1 << 20) + 6]
        synk.broadcast(world.w, np.ones(1 << 19))
        synk.all_reduce(world.w)
        synk.close()
        del world, data
        gc.collect()

    for _ in range(3):
        play()
    files, memory, threads, maps = state()
    for _ in range(10):
        play()
    files_after, memory_after, threads_after, maps_after = state()
    assert files_after <= files, (files, files_after)
    assert threads_after <= threads
    assert maps_after < maps + 10, (maps, maps_after)  # less than one in each round
    # A leak of one array per round would be at least 40 MB. malloc itself keeps about 6 MB for a while.
    assert memory_after - memory < 16 << 20, (memory_after - memory) >> 10
    assert sum(type(one) is synk.world.world.World for one in gc.get_objects()) == 1
    assert process.children() == []


@own_process
def test_idle_workers_use_no_processor_time():
    def processor_seconds(pid):
        # This is exact, whereas psutil counts clock ticks.
        threads = Path("/proc", str(pid), "task").iterdir()
        return sum(int((one / "schedstat").read_text().split()[0]) for one in threads) / 1e9

    world = open_world(3)
    world.check_usable()
    workers = world.workers()
    before = [processor_seconds(pid) for pid in workers]
    time.sleep(2)
    used = [processor_seconds(pid) - start for pid, start in zip(workers, before)]
    assert max(used) < 0.02, used


@own_process
def test_closing_gives_all_memory_back_while_a_function_is_kept():
    def shared_memory():
        rollup = Path("/proc/self/smaps_rollup").read_text()
        return 1024 * int(re.search("Pss_Shmem: *([0-9]+) kB", rollup).group(1))

    before = shared_memory()
    synk.fork(2, use_gpu=False)
    s = compiler.shared(np.zeros(4_000_000))
    f = synk.function([], updates=[(s, s + 1)], mode="FAST_COMPILE")
    f()
    synk.all_reduce(s)
    data = synk.data(np.zeros(8_000_000))
    assert shared_memory() - before > 90e6, shared_memory() - before
    synk.close()
    assert s.get_value(borrow=True)[0] == 1
    assert shared_memory() - before < 1e6, shared_memory() - before
    del f, data  # they had to be alive until here


MANY = 16


@own_process
def test_many_ranks_compute_die_and_are_replaced():
    synk.fork(MANY, use_gpu=False, master_rank=5)
    x = tt.dmatrix("x")
    total = compiler.shared(np.zeros(3), "total")
    step = synk.function(
        [x], [(x.sum(axis=0), "sum"), (x[:, 0], "gather")],
        updates=[(total, total + x.sum(axis=0))], mode="FAST_COMPILE",
    )  # fmt: skip
    rows = np.arange(300.0).reshape(100, 3)
    data = synk.data(rows)

    def check(times=5):
        for _ in range(times):
            sums, firsts = step(data)
            assert sums.tolist() == rows.sum(axis=0).tolist()
            assert firsts.tolist() == rows[:, 0].tolist()

    check(10)
    synk.all_reduce(total, op="sum")
    assert total.get_value().tolist() == (10 * rows.sum(axis=0)).tolist()
    long = synk.function([x], (x + 1, "gather"), mode="FAST_COMPILE")  # replies that are not short
    assert long(data).tolist() == (rows + 1).tolist()
    error = error_of(lambda: step(np.ones((100, 2))))
    assert isinstance(error, Exception)
    check()

    def program(rank):
        if rank.rank in (0, 13) and not rank.restarts:  # 13 starts others
            os.kill(os.getpid(), signal.SIGKILL)
        return rank.restarts

    restarts = [int(rank in (0, 13)) for rank in range(MANY)]
    assert synk.spmd(program, on_death="continue") == restarts
    check()
    for n in (3, MANY):
        assert synk.restart(n) == n
        check()
    synk.close()
