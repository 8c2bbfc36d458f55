"""Tests of unusual sequences of calls: in a worker, in threads, after deaths, and at exit."""

import functools
import multiprocessing
import os
import signal

import numpy as np
import pytest
from compilers import compiler, tt
from prelude import (
    ACTIONS, LONG, NOTHING, RAISE, SLEEP, Act, WorkerTrouble, check_in_fork, error_of, open_world,
    run_file,
)  # fmt: skip
from processes import own_process

import synkhronos as synk
from synkhronos.transports.local import LocalTransport


@own_process
@pytest.mark.parametrize("has_words", [True, False])
def test_an_exception_that_cannot_be_converted_to_text_is_a_worker_error(has_words):
    class Speechless(Exception):
        def __init__(self):  # no parameter, so Theano cannot recreate it with a longer message
            super().__init__()

        def __str__(self):
            if has_words:
                return 5
            raise OSError("no words")

    def speechless():
        raise Speechless

    ACTIONS[RAISE] = speechless
    world = open_world()
    error = error_of(lambda: world.act(NOTHING, RAISE))
    assert type(error) is synk.WorkerError and error.rank == 1, repr(error)
    assert "rank 1" in str(error) and "in speechless" in str(error)
    world.check_usable()


@own_process
def test_a_worker_that_closes_the_world_gets_an_error_and_harms_nothing():
    ACTIONS[RAISE] = synk.close
    world = open_world(3)
    data = synk.data(np.ones((600, 600)))
    error = error_of(lambda: world.act(NOTHING, RAISE, NOTHING))
    assert type(error) is synk.WorkerError and error.type_name == "SynkhronosError", repr(error)
    assert "close(): this process is rank 1, a worker" in str(error)
    assert (data.data == 1).all()
    world.check_usable()


@own_process
def test_a_child_of_a_worker_can_close_the_inherited_world_without_harm():
    def forget():
        synk.close()
        synk.fork(1, use_gpu=False)
        synk.close()

    ACTIONS[RAISE] = functools.partial(check_in_fork, forget)
    world = open_world(3)
    world.act(NOTHING, RAISE, NOTHING)
    world.check_usable()


@own_process
def test_a_memmap_of_a_deleted_file_can_be_used_after_a_restart():
    np.arange(10.0).tofile("numbers")
    numbers = np.memmap("numbers", float, "r+")
    world = open_world(3)
    data = synk.data(numbers)
    assert world.plain(data) == [45 + 9]
    os.unlink("numbers")
    for n in (3, 2):
        synk.restart(n)
        assert world.plain(data) == [45 + 3 * n]
    numbers[0] = 100
    assert world.plain(data) == [145 + 6]


@own_process
def test_deaths_in_a_row_and_as_workers_start_can_each_be_followed_by_a_restart():
    become_worker = LocalTransport._become_worker

    def die(transport, rank, *args):
        if rank == 2:
            os._exit(9)
        become_worker(transport, rank, *args)

    world = open_world(3)
    world.check_usable()
    for _ in range(3):
        for worker in multiprocessing.active_children():
            worker.kill()
        error = error_of(lambda: world.plain(np.ones(3)))
        assert "rank 1 (killed by SIGKILL), rank 2 (killed by SIGKILL)" in str(error)
        LocalTransport._become_worker = die
        for _ in range(2):
            synk.restart()
            for _ in range(2):
                error = error_of(lambda: world.plain(np.ones(3)))
                assert type(error) is synk.WorldBrokenError and "rank 2 (exit code 9)" in str(error)
        LocalTransport._become_worker = become_worker
        synk.restart()
        world.check_usable()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_world_made_as_the_script_ends_leaves_nothing(tmp_path, when):
    """`atexit` functions that were registered before the library's own run after it."""
    done = run_file("world_at_exit.py", when, cwd=tmp_path)
    assert len(done.stdout.split()) == 2 and done.stderr == ""


@own_process
def test_a_handler_that_raises_ends_the_command_with_its_exception():
    """Scripts do this for time limits. The master may be computing its share, or waiting."""

    class TimeIsUp(Exception):
        pass

    def handler(*_):
        raise TimeIsUp

    def error_with_limit(call, seconds=2):
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        return error_of(call, seconds)

    signal.signal(signal.SIGALRM, handler)
    world = open_world(3)
    error = error_with_limit(lambda: world.fused(SLEEP, NOTHING, NOTHING))
    assert type(error) is TimeIsUp, repr(error)
    world.check_usable()
    # While the master waits in the all-reduce.
    error = error_with_limit(lambda: world.fused(NOTHING, SLEEP, NOTHING), 3)
    assert type(error) is TimeIsUp, repr(error)
    world.check_usable()
    # While the master waits at the finish barrier.
    error = error_with_limit(lambda: world.act(NOTHING, LONG, NOTHING))
    assert type(error) is TimeIsUp, repr(error)
    assert "interrupted" in str(error_of(lambda: world.plain(np.ones(3))))
    synk.restart()
    world.check_usable()


@own_process
@pytest.mark.parametrize("failing", [0, 1], ids=["master", "worker"])
def test_ranks_that_did_not_fail_have_made_their_updates_but_none_after_a_collective(failing):
    """Check the documented state of replicas after an exception. A broadcast makes them equal again."""
    world = open_world(3)
    x = tt.dvector("x")
    before, after = (compiler.shared(0.0, name=name) for name in ("before", "after"))
    compute = synk.function(
        [x], (Act()(x), "gather"), updates=[(before, before + 1)], mode="FAST_COMPILE"
    )
    update = synk.function([], updates=[(after, after + 1)], mode="FAST_COMPILE")
    synk.distribute()
    actions = np.full(3, float(NOTHING))
    actions[failing] = RAISE

    def step():
        with synk.fuse():
            compute(actions)
            synk.all_reduce(world.w)
            update()

    for count in (1, 2):
        error = error_of(step)
        assert type(error) is (synk.WorkerError if failing else WorkerTrouble), repr(error)
        counts = synk.gather(before)
        assert set(np.delete(counts, failing)) == {count}, counts
        assert counts[failing] <= count
        assert set(synk.gather(after)) == {0}
    synk.broadcast(before)
    assert len(set(synk.gather(before))) == 1
    world.check_usable()
