"""Exceptions that signal handlers raise at any moment: none is lost, and the ranks stay usable."""

import gc
import itertools
import linecache
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
import theano
import theano.tensor as tt
from processes import own_process

import synkhronos as synk
from synkhronos.checkpoints import archive
from synkhronos.extensions import train, updates
from synkhronos.host.handler_errors import is_of_handler, suppress
from synkhronos.host.signals import DeferredSignals, handled_signals
from synkhronos.programs.spmd import pack
from synkhronos.stores.memory import SharedMemory
from synkhronos.world.world import current_world


class Late(TimeoutError):
    """What the handler of an alarm raises, like most of them an ``OSError``."""


def raise_late(number, frame):
    raise Late


@pytest.fixture
def alarm():
    """Raise `Late` by a signal: ``alarm()``."""
    before = signal.signal(signal.SIGALRM, raise_late)
    yield lambda *_: signal.raise_signal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "handler",
    [
        raise_late,
        lambda *given: raise_late(*given),
        lambda number, *others: raise_late(number, *others),
        lambda number, frame: [].append(1) or raise_late(number, None),
    ],
)
def test_what_a_handler_raises_is_recognized_however_it_takes_its_arguments(handler, alarm):
    signal.signal(signal.SIGALRM, handler)
    with pytest.raises(Late) as raised:
        alarm()
    assert is_of_handler(raised.value.__traceback__)
    with pytest.raises(Late), suppress(OSError):
        alarm()


@pytest.mark.parametrize("place", ["os:fstat", "zipfile:_EndRecData", "json:loads"])
def test_an_alarm_while_a_file_is_read_is_not_damage(alarm, monkeypatch, tmp_path, place):
    path = tmp_path / "file.npz"
    archive.write(path, {}, [("a", np.ones(3))])
    module, name = place.split(":")
    monkeypatch.setattr(sys.modules[module], name, alarm)
    with pytest.raises(Late):
        archive.Reader(path)
    monkeypatch.undo()
    with archive.Reader(path) as reader:
        assert reader.read("a").tolist() == [1, 1, 1]


@pytest.mark.parametrize("opens", ["read", "write"])
@pytest.mark.parametrize("method", ["seek", "tell"])
def test_an_alarm_while_zipfile_opens_a_file_is_raised(alarm, tmp_path, opens, method):
    """`zipfile` itself drops or converts any ``OSError`` there."""
    path, struck = tmp_path / "file.npz", []
    archive.write(path, {}, [])

    def strike(frame, event, called):
        if event == "c_return" and called.__name__ == method and "zipfile" in frame.f_code.co_filename:
            sys.setprofile(None)
            struck.append(1)
            alarm()

    with pytest.raises(Late):
        sys.setprofile(strike)
        try:
            archive.Reader(path) if opens == "read" else archive.write(path, {}, [])
        finally:
            sys.setprofile(None)
    assert struck


class Interrupting:
    """Its pickling is interrupted by an alarm."""

    def __reduce__(self):
        signal.raise_signal(signal.SIGALRM)
        return Interrupting, ()


def test_an_alarm_while_a_program_is_pickled_is_not_its_fault(alarm, two):
    with pytest.raises(Late):
        pack(current_world(), (print, (Interrupting(),), {}))
    with pytest.raises(Late):
        synk.spmd(print, Interrupting())


def test_all_signals_with_handlers_are_deferred_and_their_handlers_restored():
    called = []
    numbers = signal.SIGALRM, signal.SIGUSR1, signal.SIGRTMIN
    former = [signal.signal(one, lambda number, _: called.append(number)) for one in numbers]
    try:
        handlers = {one: signal.getsignal(one) for one in handled_signals()}
        with DeferredSignals():
            with DeferredSignals():
                for one in numbers:
                    signal.raise_signal(one)
            assert called == []
        assert called == list(numbers)
        assert {one: signal.getsignal(one) for one in handled_signals()} == handlers
    finally:
        for one, handler in zip(numbers, former):
            signal.signal(one, handler)


@pytest.mark.parametrize("inside", [True, False])
def test_a_handler_that_raises_at_each_step_leaves_no_signal_deferred(alarm, inside):
    """Neither its own signal nor another one is deferred for ever, whatever step is interrupted."""
    called = []
    before = signal.signal(signal.SIGUSR1, lambda *_: called.append("usr1"))
    handlers = [signal.getsignal(one) for one in (signal.SIGALRM, signal.SIGUSR1)]

    def work():
        with DeferredSignals():
            if inside:
                signal.raise_signal(signal.SIGUSR1)

    try:
        for step in itertools.count():
            called.clear()
            seen, was_struck = struck(work, step, ["host/signals.py"])
            assert seen == was_struck, step
            signal.raise_signal(signal.SIGUSR1)
            assert called and set(called) == {"usr1"}, step
            with pytest.raises(Late):
                alarm()
            assert [signal.getsignal(one) for one in (signal.SIGALRM, signal.SIGUSR1)] == handlers
            if not was_struck:
                break
        assert step > 10
    finally:
        signal.signal(signal.SIGUSR1, before)


def _is_statement_of_block(frame):
    """Whether it is at a ``try`` or ``with``, where no handler can run, and which no block protects."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
    return line.startswith(("try:", "with "))


def struck(work, step, files):
    """Call ``work()``, and raise an alarm at the line with this number that it runs in some files.

    Return whether the exception was raised, and whether there were as many lines.
    """
    left = [step]
    endings = tuple(files)

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.endswith(endings):
            return None
        if event == "line" and not _is_statement_of_block(frame):
            if not left[0]:
                sys.settrace(None)
                left[0] -= 1
                signal.raise_signal(signal.SIGALRM)
            left[0] -= 1
        return trace

    former = sys.gettrace()
    try:
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(former)
    except Late:
        return True, True
    return False, left[0] < 0


def holes(memory):
    return memory._small.holes(), memory._large.holes()


@pytest.mark.parametrize("work", ["allocate", "collect", "trim"])
def test_memory_is_not_lost_when_a_handler_raises_at_each_step(alarm, work):
    memory = SharedMemory(1)
    kept = [memory.allocate(nbytes) for nbytes in (100, 5000, 200, 70000)]
    before = holes(memory)

    def allocate():
        for nbytes in (64, 9000):
            memory.allocate(nbytes)

    for step in itertools.count():
        if work != "allocate":
            allocate()
        calls = {"allocate": allocate, "collect": memory.collect, "trim": memory.trim}
        seen, was_struck = struck(calls[work], step, ["stores/memory.py"])
        assert seen == was_struck, step
        memory.collect()
        assert holes(memory) == before, step
        if not was_struck:
            break
    assert step > 10
    for number, block in enumerate(kept):
        block[...] = number
    assert [int(block[0]) for block in kept] == [0, 1, 2, 3]


@own_process
def test_an_alarm_during_the_fork_of_workers_is_not_lost():
    """At every function that runs in `os.fork`, whose exceptions Python drops."""
    seen, dropped, moment = [], [], ["before"]
    sys.unraisablehook = dropped.append
    signal.signal(signal.SIGALRM, raise_late)
    master = os.getpid()

    def strike(when):
        if when == moment[0] and os.getpid() == master:
            moment[0] = None
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    os.register_at_fork(before=lambda: strike("before"), after_in_parent=lambda: strike("after"))
    synk.fork(3, use_gpu=False)
    x = tt.dvector("x")
    f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
    for when in ("before", "after"):
        moment[0] = when
        try:
            if when == "after":
                synk.restart()
            synk.distribute()
        except Late:
            seen.append(when)
        assert f(np.ones(4)) == 4
        assert synk.spmd(lambda rank: signal.pthread_sigmask(signal.SIG_BLOCK, [])) == [set()] * 3
    assert seen == ["before", "after"] and dropped == []
    synk.close()


class Script:
    """A world with ten kinds of calls, by name in ``calls``."""

    def __init__(self, path):
        synk.fork(2, use_gpu=False)
        x, y = tt.dmatrix("x"), tt.dvector("y")
        self.w = theano.shared(np.ones(3), name="w")
        self.f = synk.function([x], (tt.dot(x, self.w).sum(), "sum"), mode="FAST_COMPILE")
        loss = tt.sqr(tt.dot(x, self.w) - y).mean()
        step = train.make_train_function(loss, [self.w], x, y, updates.sgd, learning_rate=0.01)
        rows, targets = synk.data(np.ones((6, 3))), synk.data(np.ones(6))
        self.rows = rows
        synk.distribute()
        self.calls = {
            "call": lambda: self.f(rows),
            "fuse": self.fuse,
            "step": lambda: step(rows, targets),
            "broadcast": lambda: synk.broadcast(self.w, np.ones(3)),
            "all_reduce": lambda: synk.all_reduce(self.w),
            "get_value": lambda: synk.get_value(1, self.w),
            "spmd": lambda: synk.spmd(program, self.w),
            "save": lambda: synk.save(path, {"step": 1}),
            "load": lambda: synk.load(path),
            "restart": synk.restart,
        }
        for call in self.calls.values():
            call()

    def fuse(self):
        with synk.fuse():
            self.f(self.rows)
            synk.all_reduce(self.w)

    def check(self):
        """Check that the ranks can be used, at least after a restart."""
        try:
            self.f(self.rows)
        except synk.WorldBrokenError:
            synk.restart()
        synk.broadcast(self.w, np.ones(3))
        assert self.f(self.rows) == 18
        assert synk.gather(self.w).tolist() == [[1, 1, 1]] * 2

    def free_memory(self):
        """Return how much memory is free in the store, after a restart."""
        for call in self.calls.values():
            call()  # an interrupted function keeps arrays until its next call
        self.f(self.rows)
        gc.collect()
        memory = current_world().rank_state.store.memory
        memory.collect()
        return [sum(stop - start for start, stop in one) for one in holes(memory)]

    def check_memory(self, before):
        """Check that nothing stays in the store; a late rank keeps its arrays for one more call."""
        found = [self.free_memory() for _ in range(3)]
        assert before in found, (before, found)


def program(rank, w):
    rank.all_reduce(w)
    rank.center(w, "numbers").push()


class Alarms:
    """Alarms at random moments, whose handler raises; what Python itself drops is counted."""

    def __init__(self):
        self.places, self.dropped = [], []
        sys.unraisablehook = self._drop
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, number, frame):
        place = []
        while frame is not None:
            code = frame.f_code
            place.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
            frame = frame.f_back
        self.places.append(place)
        raise Late

    def _drop(self, what):
        if what.exc_type is Late:
            self.dropped.append(self.places[-1])

    def strike(self, call, seconds):
        """Repeat a call until an alarm comes; return whether its exception was seen or dropped."""
        before = len(self.dropped)
        try:
            self._repeat(call, seconds)
        except Late:
            return True
        return len(self.dropped) > before

    def _repeat(self, call, seconds):
        # Not in the block: Python 3.13 leaves it if a handler raises where such a loop jumps back.
        before = len(self.places)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while len(self.places) == before:
            call()
        for _ in range(100):  # let it arrive if it came at the very end
            pass


@own_process(timeout=1800)
@pytest.mark.parametrize("count", [30, pytest.param(4000, marks=pytest.mark.slow)])
def test_no_exception_of_an_alarm_is_lost_and_the_ranks_can_be_used(tmp_path, count):
    script, alarms, rng = Script(tmp_path / "checkpoint.npz"), Alarms(), np.random.RandomState(8)
    before = script.free_memory()
    for name in itertools.islice(itertools.cycle(script.calls), count):
        call = script.calls[name]
        began = time.perf_counter()
        call()
        seconds = rng.uniform(1e-5, 1.2 * (time.perf_counter() - began))
        assert alarms.strike(call, seconds), "\n".join([name, *alarms.places[-1]])
        script.check()
    assert len(alarms.places) == count
    own = os.path.dirname(synk.__file__)
    for place in alarms.dropped:  # by Python, in a callback or a finalizer of its own
        assert not place[0].startswith(own), place
        assert "weakref.py" in place[0] or "zipfile.py" in "".join(place[:2]), place
    script.check_memory(before)
    synk.close()


FILES = [
    "transports/local.py", "stores/memory.py", "transports/mailbox.py", "world/schedule.py",
    "transports/waiting.py", "world/world.py", "world/call_lock.py", "world/rank_state.py",
    "functions/call.py", "functions/function.py",
]  # fmt: skip


@own_process(timeout=1800)
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["call", "fuse", "get_value"])
def test_a_handler_may_raise_at_each_line_of_a_call(tmp_path, name, every):
    script = Script(tmp_path / "checkpoint.npz")
    signal.signal(signal.SIGALRM, raise_late)
    before = script.free_memory()
    for step in itertools.count(0, every):
        seen, was_struck = struck(script.calls[name], step, FILES)
        assert seen == was_struck, step
        script.check()
        if not was_struck:
            break
    assert step > 50
    script.check_memory(before)
    synk.close()
