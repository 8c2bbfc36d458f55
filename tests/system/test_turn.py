"""The turn of a call: of two calls, one is refused or waits, whatever comes between their steps."""

import collections
import gc
import itertools
import signal
import sys
import threading
import time

import numpy as np
import pytest
import theano
import theano.tensor as tt
from scheduling import all_schedules, in_threads

import synkhronos as synk
from synkhronos._errors import BUSY
from synkhronos.host import handler_errors
from synkhronos.world.call_lock import CallLock, takes_call_lock


class Stop(Exception):
    """What a signal handler raises."""


class Steps(dict):
    """The state of a turn: before each of its operations, something may come between."""

    def __init__(self, between, entries=()):
        super().__init__(entries)
        self._between = between

    def _stepped(name):  # noqa: N805
        def operation(self, *args):
            self._between(name)
            if name == "setdefault" and isinstance(args[1], dict):
                args = args[0], Steps(self._between, args[1])  # the next turn is observed, too
            return getattr(dict, name)(self, *args)

        return operation

    setdefault, get = map(_stepped, ("setdefault", "get"))


class Gate:
    """What a thread waits at. Somebody may open it, or not."""

    def __init__(self, between):
        self._between = between

    def acquire(self, timeout=None):
        if timeout is not None:
            self._between("wait")

    def release(self):
        pass


class Calls:
    """An object with a public method, whose calls must not overlap."""

    def __init__(self, waits, between):
        self.call_lock = CallLock(waits is True, lambda: None)
        self._always = waits == "always"
        self.call_lock._last = Steps(between)
        self.call_lock._stacks = lambda: between("stacks") or sys._current_frames()
        self.call_lock._make_gate = lambda: Gate(between)
        self._between = between
        self.done, self.refused, self._inside = [], [], None

    def call(self, what):
        """Make a call, and note whether it was made or refused."""
        try:
            if self._always:
                with self.call_lock.waited_for:
                    self._call(what)
            else:
                self._call_in_turn(what)
        except synk.SynkhronosError as error:
            assert str(error) == BUSY
            self.refused.append(what)

    @takes_call_lock
    def _call_in_turn(self, what):
        self._call(what)

    def _call(self, what):
        assert self._inside is None, (self._inside, what)
        self._inside = what
        try:
            self._between("command")
            assert self._inside == what  # nobody has used the memory of the outputs
            self.done.append(what)
        finally:
            self._inside = None


def n_refused(waits, own, others, preemptions=None):
    """Make calls in two threads in all schedules, or in those with few preemptions.

    Returns how many calls were refused in how many of the schedules.
    """
    counts = collections.Counter()

    def functions_for(schedule):
        calls = Calls(waits, lambda name: schedule.switch(waits=name == "wait"))

        def check():
            counts[len(calls.refused)] += 1
            assert sorted(calls.done + calls.refused) == sorted(own + others)
            calls.call("after")
            assert calls.done[-1] == "after"

        return [lambda: [*map(calls.call, own)], lambda: [*map(calls.call, others)]], check

    all_schedules(functions_for, preemptions)
    return counts


def test_calls_of_two_threads_never_overlap():
    counts = n_refused(False, ["a", "b"], ["c"], preemptions=4)
    assert counts.keys() == {0, 1, 2} and counts.total() > 400


@pytest.mark.parametrize("waits", [True, "always"])
@pytest.mark.parametrize(
    "own, preemptions", [(["a"], None), pytest.param(["a", "b"], 4, marks=pytest.mark.slow)]
)
def test_calls_of_two_threads_wait_for_each_other(own, preemptions, waits):
    counts = n_refused(waits, own, ["c"], preemptions)
    assert counts.keys() == {0} and counts.total() > 50


def waiting(turn, work, n_threads):
    """Start threads that call ``work(number)``, each once the one before it has a place; return them."""
    threads = []
    for number in range(n_threads):
        threads.append(threading.Thread(target=work, args=(number,), daemon=True))
        threads[-1].start()
        while len(turn._waiting) < len(threads):
            time.sleep(1e-3)
    return threads


def test_the_end_of_the_world_ends_all_waits():
    errors, said = [], []

    def check():
        if errors:
            raise errors[0]

    turn = CallLock(False, check)

    def work(number):
        try:
            with turn.waited_for:
                said.append("made")
        except synk.ClosedError as error:
            said.append(str(error))

    with turn:
        threads = waiting(turn, work, 3)
        errors.append(synk.ClosedError("closed"))
        for thread in threads:
            thread.join(20)
    assert said == ["closed"] * 3 and not turn._waiting


def test_the_exception_of_a_handler_ends_a_wait():
    turn, over = CallLock(False, lambda: None), threading.Event()

    def hold():
        with turn.waited_for:
            over.wait(20)

    def handler(*_):
        raise Stop

    thread = threading.Thread(target=hold)
    thread.start()
    while not turn.thread:
        time.sleep(1e-3)
    former = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Stop), turn.waited_for:
            pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        over.set()
        thread.join(20)
    assert not turn._waiting
    with turn:
        pass


ROWS = np.arange(300, 900, 7)


def functions():
    x = tt.dmatrix("x")
    made = [synk.function([x], [(x * 2, "gather")], name=name) for name in ("one", "other")]
    for each in made:
        each(np.ones((4, 5)))
    return made


def call_in_threads(work, seconds=1.0):
    """Run ``work(number, is_over)`` in two threads; raise what one of them raises."""
    end = time.monotonic() + seconds
    in_threads(lambda number: work(number, lambda: time.monotonic() > end))


@pytest.mark.parametrize("threads", ["refuse", "wait"])
@pytest.mark.parametrize("n_parallel", [1, 2])
def test_each_thread_gets_the_outputs_of_its_own_rows(world_of, n_parallel, threads):
    world_of(n_parallel, threads=threads)
    made, counts = functions(), [collections.Counter(), collections.Counter()]

    def work(number, is_over):
        for rows in itertools.cycle(ROWS):
            if is_over():
                return
            given = np.full((rows, 5), number + 1.0)
            try:
                (value,) = made[number](given)
            except synk.SynkhronosError:
                counts[number]["refused"] += 1
                time.sleep(1e-4)
                continue
            np.testing.assert_array_equal(value, 2 * given)
            counts[number]["made"] += 1

    call_in_threads(work)
    assert all(one["made"] > 5 for one in counts), counts
    assert sum(one["refused"] for one in counts) == 0 or threads == "refuse"


def test_a_handler_between_any_two_steps_does_not_change_outputs(two):
    (one, other), said = functions(), collections.Counter()

    def handler(*_):
        try:
            (value,) = other(np.full((311, 5), 7.0))
            said["right" if (value == 14).all() else "wrong"] += 1
        except synk.SynkhronosError:
            said["refused"] += 1

    former = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 2e-3, 7.3e-4)
        for rows in ROWS:
            given = np.full((rows, 5), float(rows))
            (value,) = one(given)
            np.testing.assert_array_equal(value, 2 * given)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert said["refused"] and not said["wrong"], said


def test_a_thread_that_saves_never_mixes_steps(world_of, tmp_path):
    world_of(2, threads="wait")
    shareds = [theano.shared(np.zeros(2000), f"w{number}") for number in range(4)]
    step = synk.function([], updates=[(one, one + 1) for one in shareds])
    synk.distribute()
    saved = []

    def work(number, is_over):
        while not is_over():
            if number:
                synk.save(tmp_path / f"{len(saved)}.npz")
                saved.append(tmp_path / f"{len(saved)}.npz")
            else:
                step()

    call_in_threads(work)
    assert len(saved) > 2
    for path in saved:
        synk.load(path)
        assert len({one.get_value()[0] for one in shareds}) == 1
        assert synk.in_sync()


def test_other_threads_wait_for_the_end_of_a_fuse_block(world_of):
    world_of(2, threads="wait")
    one, other = functions()
    order = []

    def work(number, is_over):
        if number:
            time.sleep(0.05)
            order.append(other(np.ones((4, 5)))[0].sum())
            return
        with synk.fuse():
            pending = one(np.ones((300, 5)))
            time.sleep(0.3)
            order.append("end of the block")
        assert pending.result()[0].shape == (300, 5)

    call_in_threads(work)
    assert order == ["end of the block", 40.0]


def in_two_threads(rank, work):
    """Call ``work(rank, number)`` in two threads of a rank; return what they return."""
    found = {}

    def run(number):
        try:
            found[number] = work(rank, number)
        except synk.SynkhronosError as error:
            found[number] = str(error)

    thread = threading.Thread(target=run, args=(1,))
    thread.start()
    run(0)
    thread.join()
    rank.barrier()
    return [found[0], found[1]]


def pushes(rank, number):
    for _ in range(60):
        variable = WEIGHTS[number]
        variable.set_value(variable.get_value(borrow=True) + 1, borrow=True)
        rank.center(variable, str(number)).push()
    return "done"


def program(rank):
    centers = [rank.center(one, str(number)) for number, one in enumerate(WEIGHTS)]
    rank.barrier()
    said = in_two_threads(rank, pushes)
    return said, [set(one.value().tolist()) for one in centers]


WEIGHTS = []


@pytest.mark.parametrize("threads", ["refuse", "wait"])
def test_threads_of_a_rank_in_a_program(world_of, threads):
    world_of(2, threads=threads)
    WEIGHTS[:] = [theano.shared(np.zeros(300_000), f"w{number}") for number in (0, 1)]
    synk.function([], sum(one.sum() for one in WEIGHTS))
    synk.distribute()
    for said, totals in synk.spmd(program):
        if threads == "wait":
            assert said == ["done", "done"] and totals == [{120.0}, {120.0}]
        else:
            assert any(one == BUSY for one in said) and all(len(each) == 1 for each in totals)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_the_stacks_of_threads_are_asked_for(monkeypatch, enabled):
    """Up to Python 3.11.4, a finalizer there may wait for a lock forever."""
    monkeypatch.setattr(sys, "_current_frames", gc.isenabled)
    (gc.enable if enabled else gc.disable)()
    try:
        assert handler_errors.stacks() is False and gc.isenabled() == enabled
    finally:
        gc.enable()
