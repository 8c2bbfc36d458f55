"""Tests of what workers do again while they wait: it must not change anything."""

import mmap
import time

import numpy as np
import pytest

import synkhronos as synk
from compilers import compiler, tt as T
from synkhronos.functions.call import CallFunction
from synkhronos.host.machine import cores
from synkhronos.transports import waiting
from synkhronos.world.rank_state import Command, RankState
from synkhronos.world.world import current_world

ROWS = np.arange(60, dtype="float64").reshape(20, 3)

pytestmark = pytest.mark.skipif(cores() < 2, reason="ranks poll only if there is a core for each")


class Unreadable(Command):
    """Raises when a worker unpickles it."""

    def __reduce__(self):
        return _refuse, ()

    def run(self, state):
        pass


def _refuse():
    raise ValueError("cannot be read")


class Rehearsals:
    """Counts what the worker does while it waits."""

    def __init__(self, monkeypatch):
        # Of the worker: its commands, the last of them after which it has rehearsed, and how many calls.
        self._counts = counts = np.frombuffer(mmap.mmap(-1, 24), "int64")
        execute, warm_caches, bind = RankState.execute, RankState.warm_caches, CallFunction.bind
        self.is_warming = False  # in this process

        def counted_execute(state, payload):
            counts[0] += 1
            return execute(state, payload)

        def counted_warm(state):
            self.is_warming = True
            warm_caches(state)
            self.is_warming = False
            counts[1] = counts[0]

        def counted_bind(call, state):
            counts[2] += self.is_warming
            return bind(call, state)

        monkeypatch.setattr(waiting, "_COLD", -1)  # also after short work
        monkeypatch.setattr(RankState, "execute", counted_execute)
        monkeypatch.setattr(RankState, "warm_caches", counted_warm)
        monkeypatch.setattr(CallFunction, "bind", counted_bind)

    def _settle(self):
        until = time.monotonic() + 10
        while self._counts[1] < self._counts[0]:
            assert time.monotonic() < until, "the worker has not rehearsed"
            time.sleep(1e-3)

    def after(self, run, *args, **kwargs):
        """Return the result of ``run``, and how many calls are rehearsed after it."""
        self._settle()
        calls = self._counts[2]
        try:
            result = run(*args, **kwargs)
        except ValueError as error:
            result = error
        self._settle()
        return result, self._counts[2] - calls


@pytest.fixture
def warmings(monkeypatch):
    counted = Rehearsals(monkeypatch)
    synk.fork(2, use_gpu=False)
    yield counted
    synk.close()


@pytest.fixture
def counting():
    """A function that counts its calls on each rank, and the count."""
    x, count = T.dmatrix("x"), compiler.shared(0, "count")
    return synk.function([x], (x.sum(axis=0), "sum"), updates=[(count, count + 1)]), count


def test_a_rehearsal_neither_computes_nor_changes_what_follows(warmings, counting):
    f, count = counting
    synk.distribute()
    data = synk.data(ROWS)
    batches = [None, slice(2, 9), slice(9, 16), slice(0, 20, 3), slice(15, 1, -2), 7, [3, 3, 1, 8]]
    for number, batch in enumerate(batches * 2):
        result, n_warmed = warmings.after(f, data, batch=batch)
        chosen = ROWS[:batch] if isinstance(batch, int) else ROWS if batch is None else ROWS[batch]
        np.testing.assert_array_equal(result, chosen.sum(axis=0))
        assert [int(one) for one in synk.gather(count, nd_up=1)] == [number + 1] * 2
        assert n_warmed == 1


def test_data_that_have_moved_or_gone_are_not_in_the_way(warmings, counting):
    f, count = counting
    synk.distribute()
    data = synk.data(ROWS)
    for length in (20, 2000, 200_000, 5):
        data.set_value(np.ones((length, 3)))
        assert warmings.after(f, data)[1] == 1
        np.testing.assert_array_equal(f(data, batch=slice(1, 5)), [4.0] * 3)
    del data
    assert warmings.after(synk.broadcast, count) == (None, 0)
    np.testing.assert_array_equal(f(ROWS), ROWS.sum(axis=0))


def test_nothing_is_rehearsed_while_steps_are_measured(warmings, counting):
    f, _ = counting
    synk.distribute()
    f(ROWS)
    with synk.profile() as measured:
        for _ in range(3):
            assert warmings.after(f, ROWS)[1] == 0
    assert len(measured.seconds) == 3
    assert warmings.after(f, ROWS)[1] == 1


def test_bytes_that_cannot_be_read_do_not_hide_the_next_command(warmings, counting):
    f, _ = counting
    synk.distribute()
    data = synk.data(ROWS)
    f(data)
    with pytest.raises(synk.WorkerError, match="cannot be read"):
        current_world().run(Unreadable())
    np.testing.assert_array_equal(f(data), ROWS.sum(axis=0))
    assert warmings.after(f, data)[1] == 1


def test_an_error_in_a_rehearsal_ends_nothing(warmings, counting, monkeypatch):
    bind, failed = CallFunction.bind, np.frombuffer(mmap.mmap(-1, 8), "int64")

    def fail(call, state):
        if warmings.is_warming:
            failed[0] += 1
            raise OSError("the file of an argument is gone")
        return bind(call, state)

    f, count = counting
    monkeypatch.setattr(CallFunction, "bind", fail)
    synk.distribute()
    for number in range(1, 4):
        warmings.after(f, ROWS)
        assert [int(one) for one in synk.gather(count, nd_up=1)] == [number] * 2
    assert failed[0] == 3
