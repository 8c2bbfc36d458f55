"""Conformance checks on stores and named memory, and tests of shared memory and deaths in it."""

import contextlib
import gc
import itertools
import os
import re
import signal
import sys
import tempfile
import threading
from random import Random
from unittest import mock

import numpy as np
import pytest
from checks.stores import CHECKS
from hypothesis import given, strategies as st
from hypothesis.stateful import (
    Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule, run_state_machine_as_test,
)  # fmt: skip
from oracle import examples
from scheduling import in_threads

from synkhronos.stores import memory as memory_module
from synkhronos.stores.base import SharedMemoryStore
from synkhronos.stores.memory import Deallocations, FreeList, SharedMemory
from checks.children import as_rank, begin, child, die, end, kill
from checks import named_memory
from synkhronos._errors import SynkhronosError

MEBIBYTE = 1 << 20


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[len("check_") :])
def test_store(check, ranks, tmp_path):
    wants_path = "path" in check.__code__.co_varnames[: check.__code__.co_argcount]
    check(ranks, tmp_path / "array") if wants_path else check(ranks)


@pytest.fixture
def memory():
    return SharedMemory(2)


@pytest.fixture
def store(memory):
    return SharedMemoryStore(memory)


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "float32", "complex128"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (3, 4), (70, 80)])
def test_what_a_rank_gets_is_the_array_itself(store, dtype, shape):
    array = store.empty(shape, dtype)
    got = store.get(store.put(array))
    assert got.dtype == dtype and got.shape == shape
    assert got.flags.writeable and got.flags.c_contiguous
    assert got.ctypes.data == array.ctypes.data and array.ctypes.data % 64 == 0
    array[...] = 1
    np.testing.assert_array_equal(got, np.ones(shape))


def test_memory_is_free_when_the_last_view_of_it_dies(store):
    array = store.empty((1000,), "float64")
    view = array[10:20].reshape(2, 5)
    address = array.ctypes.data
    del array
    gc.collect()
    others = [store.empty((1000,), "float64") for _ in range(3)]
    assert address not in [other.ctypes.data for other in others]
    del view
    gc.collect()
    assert store.empty((1000,), "float64").ctypes.data == address


@given(
    actions=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([0, 1, 63, 64, 65, 5000, 70000])), max_size=40
    )
)
@examples(30)
def test_blocks_in_use_never_overlap(actions):
    memory, blocks = SharedMemory(1), {}
    for number, nbytes in actions:
        blocks.pop(number, None)
        block = blocks[number] = memory.allocate(nbytes)
        assert block.shape == (nbytes,)
        block[:] = number
    for number, block in blocks.items():
        assert (block == number).all()
    places = sorted((block.ctypes.data, block.nbytes) for block in blocks.values())
    for (start, nbytes), (following, _) in zip(places, places[1:]):
        assert start + nbytes <= following


def resident(memory):
    """Return the number of bytes of the shared memory that are resident."""
    total, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            limits = re.match("([0-9a-f]+)-([0-9a-f]+) ", line)
            if limits:
                start = int(limits[1], 16)
                inside = memory.address <= start < memory._end
            elif inside and line.startswith("Rss:"):
                total += 1024 * int(line.split()[1])
    return total


def test_pages_of_blocks_that_died_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(memory_module, "_KEPT", 9 * MEBIBYTE)
    memory = SharedMemory(2)
    blocks = [memory.allocate(4 * MEBIBYTE) for _ in range(4)]
    for block in blocks:
        block[:] = 1
    before = resident(memory)
    blocks.clear()
    del block
    memory.collect()
    kept = resident(memory)
    assert before >= 16 * MEBIBYTE and 8 * MEBIBYTE <= kept < 9 * MEBIBYTE
    memory.trim()
    assert resident(memory) < MEBIBYTE


def test_a_rank_asks_for_the_memory_that_is_left_before_it_allocates_pages(memory, monkeypatch):
    left = [200 * MEBIBYTE]
    monkeypatch.setattr(memory_module, "_memory_left", lambda: left[0])
    first = memory.allocate(64 * MEBIBYTE)
    left[0] = 100 * MEBIBYTE
    with pytest.raises(MemoryError, match=r"\d+ bytes were requested, \d+ are left"):
        memory.allocate(64 * MEBIBYTE)  # some memory is reserved for simultaneous allocations
    left[0] = 200 * MEBIBYTE
    memory.allocate(64 * MEBIBYTE)
    assert first.any() == 0


def test_more_memory_than_there_is_is_a_memory_error_and_the_rest_is_usable(memory):
    for nbytes in (1 << 45, 1 << 60):
        with pytest.raises(MemoryError, match="shared memory"):
            memory.allocate(nbytes)
    memory.allocate(100)[:] = 1


def allocate_and_drop(memory, mark, steps):
    """Keep some blocks full of a number, drop and check others."""
    kept, random = [], Random(mark)
    for step in range(steps):
        block = memory.allocate(random.choice([1, 64, 1000, 4096, 5000, 40_000]))
        block[:] = mark
        kept.append(block)
        if len(kept) > 10:
            assert (kept.pop(random.randrange(10)) == mark).all()
        if step % 50 == 0:
            memory.trim()
    assert all((block == mark).all() for block in kept)


def check_all_is_free(memory):
    gc.collect()
    memory.trim()
    (start, large, stop) = memory.parts_of_span(0)
    assert memory._small.holes() == [(start + 4096, large)]
    assert memory._large.holes() == [(large, stop)]


@pytest.mark.parametrize("kept", [0, MEBIBYTE])
def test_threads_allocate_and_free_at_the_same_time(monkeypatch, kept):
    monkeypatch.setattr(memory_module, "_KEPT", kept)
    memory = SharedMemory(1)
    in_threads(lambda mark: allocate_and_drop(memory, 1 + mark, 2000))
    check_all_is_free(memory)


class Allocating:
    """Garbage that allocates and frees blocks when it is collected."""

    def __init__(self, memory):
        self.memory, self.own, self.block = memory, self, memory.allocate(5000)
        self.block[:] = 200

    def __del__(self):
        assert (self.block == 200).all()
        self.block = None
        for nbytes in (100, 9000):
            self.memory.allocate(nbytes)[:] = 201


def test_what_is_collected_inside_an_allocation_allocates_and_frees():
    memory, threshold = SharedMemory(1), gc.get_threshold()
    gc.set_threshold(1)

    def work(mark):
        for _ in range(300):
            Allocating(memory)
            allocate_and_drop(memory, 1 + mark, 2)

    try:
        in_threads(work)
    finally:
        gc.set_threshold(*threshold)
    check_all_is_free(memory)


def test_what_an_interrupted_change_has_lost_is_found_when_no_other_one_is_in_progress(monkeypatch):
    """As when a signal handler allocates inside an allocation, and an alarm comes there."""
    memory, watch, nested = SharedMemory(1), Deallocations.watch, []

    def fail(*args):
        raise TimeoutError

    def interrupt(blocks, block, place):
        monkeypatch.setattr(Deallocations, "watch", fail)
        with pytest.raises(TimeoutError):
            memory.allocate(7000)
        monkeypatch.setattr(Deallocations, "watch", watch)
        nested.append(memory.allocate(7000))
        assert memory._changes.any_lost  # what the outer allocation has taken is not lost
        watch(blocks, block, place)

    monkeypatch.setattr(Deallocations, "watch", interrupt)
    outer, inner = memory.allocate(7000), nested.pop()
    outer[:], inner[:] = 1, 2
    assert (outer == 1).all()
    del outer, inner
    check_all_is_free(memory)
    assert not memory._changes.any_lost


def test_a_block_is_freed_although_a_handler_has_raised_where_its_allocation_ended(monkeypatch):
    memory = SharedMemory(1)
    before = memory._small.holes()

    def interrupted(*args):
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(memory_module.Changes, "__exit__", interrupted)
        with contextlib.suppress(TimeoutError):
            memory.allocate(64)
    for _ in range(2):  # the first finds it
        memory.collect()
    assert memory._small.holes() == before


def test_a_block_that_another_thread_takes_during_the_search_for_lost_ones_is_not_lost(monkeypatch):
    memory, blocks, watch, living = SharedMemory(1), [], Deallocations.watch, Deallocations.living
    has_taken, may_go_on = threading.Event(), threading.Event()

    def fail(*args):
        raise TimeoutError

    def wait(*args):  # in the other thread, between two steps of its change
        has_taken.set()
        may_go_on.wait()
        watch(*args)

    def find_before_it_goes_on(*args):
        found = living(*args)
        may_go_on.set()
        thread.join()
        return found

    monkeypatch.setattr(Deallocations, "watch", fail)
    with pytest.raises(TimeoutError):
        memory.allocate(5000)
    monkeypatch.setattr(Deallocations, "watch", wait)
    monkeypatch.setattr(Deallocations, "living", find_before_it_goes_on)
    thread = threading.Thread(target=lambda: blocks.append(memory.allocate(5000)))
    with mock.patch.object(memory, "collect"):  # which would find what is lost
        thread.start()
        has_taken.wait()
    memory.collect()
    may_go_on.set()
    thread.join()
    monkeypatch.undo()
    blocks += [memory.allocate(5000) for _ in range(3)]
    for number, block in enumerate(blocks):
        block[:] = number
    assert [set(block.tolist()) for block in blocks] == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize("change", [
    lambda free: [(free.take(8), 8)],
    lambda free: free.give(8, 8),
    lambda free: [(low, high - low) for low, high in free.cut(0, 28)],
], ids=["take", "give", "cut"])  # fmt: skip
def test_a_change_that_comes_between_two_steps_of_another_one_is_kept(change):
    """As of a signal handler, a finalizer or another thread; at each line in turn."""
    for place in itertools.count():
        free = FreeList(0, 64)
        assert free.take(24) == 0  # the first third is free again, the second one may be given
        free.give(0, 8)
        changed, taken = interrupted(change, free, place)
        rest = [(16, 8)] if changed is None else [*changed, (8, 16)]
        for start, nbytes in [*rest, *taken]:
            free.give(start, nbytes)
        assert free.holes() == [(0, 64)]
        if not taken:
            break
    assert place > 3


def interrupted(change, free, place):
    """Return ``change(free)``, and what was taken before the line that is the n-th to be executed."""
    lines, taken = itertools.count(), []

    def trace(frame, event, argument):
        if frame.f_code.co_filename != memory_module.__file__:
            return None
        if event == "line" and next(lines) == place:
            taken.append((free.take(4), 4))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return change(free), taken
    finally:
        sys.settrace(before)


class FreeBytes(RuleBasedStateMachine):
    """A `FreeList` compared with a list that has one entry per byte."""

    START, STOP = 7, 71

    def __init__(self):
        super().__init__()
        self.free = FreeList(self.START, self.STOP)
        self.is_free = [self.START <= byte < self.STOP for byte in range(self.STOP + 5)]

    blocks = Bundle("blocks")

    @rule(nbytes=st.integers(1, 20), target=blocks)
    def take(self, nbytes):
        start = self.free.take(nbytes)
        fits = [
            byte
            for byte in range(len(self.is_free) - nbytes + 1)
            if all(self.is_free[byte : byte + nbytes])
        ]
        assert start == (fits[0] if fits else None)
        if start is None:
            return multiple()
        self.is_free[start : start + nbytes] = [False] * nbytes
        return start, nbytes

    @rule(block=consumes(blocks))
    def give(self, block):
        start, nbytes = block
        self.free.give(start, nbytes)
        self.is_free[start : start + nbytes] = [True] * nbytes

    @rule(start=st.integers(0, 75), nbytes=st.integers(0, 40))
    def cut_and_give(self, start, nbytes):
        before, stop = self.free.holes(), start + nbytes
        found = self.free.cut(start, stop)
        cut = [any(low <= byte < high for low, high in found) for byte in range(len(self.is_free))]
        assert cut == [free and start <= byte < stop for byte, free in enumerate(self.is_free)]
        assert self.free.cut(start, stop) == []
        for low, high in found:
            self.free.give(low, high - low)
        assert self.free.holes() == before

    @invariant()
    def neighbours_are_merged(self):
        edges = [self.is_free[k] != self.is_free[k - 1] for k in range(1, len(self.is_free))]
        assert 2 * len(self.free.holes()) == sum(edges)


def test_a_free_list_gives_the_first_bytes_that_fit_and_merges_neighbours():
    run_state_machine_as_test(FreeBytes, settings=examples(60))


@pytest.mark.parametrize("check", named_memory.CHECKS, ids=lambda check: check.__name__[len("check_") :])
def test_named_memory(check, ranks):
    check(ranks)


def test_a_lock_is_free_when_its_holder_was_killed(store):
    lock = store.named_memory.lock(5)
    with child(lock.try_acquire) as holder:
        assert not lock.is_free() and not lock.try_acquire()
        kill(holder)
        assert lock.is_free() and lock.try_acquire()
    lock.release()


def test_nobody_waits_longer_than_it_may_for_a_rank_that_is_stopped_while_it_makes_an_array(store):
    named_memory = store.named_memory
    named_memory.array("before", 3, "int8")

    def stop_waiting():
        raise TimeoutError

    with named_memory.pausing(stop_waiting), child(named_memory._directory.try_acquire) as holder:
        os.kill(holder, signal.SIGSTOP)
        assert named_memory.array("before", 3, "int8").tolist() == [0] * 3
        with pytest.raises(TimeoutError):
            named_memory.array("after", 3, "int8")
    assert named_memory.array("after", 3, "int8").tolist() == [0] * 3


@pytest.mark.parametrize("step", ["_forget", "memory.give_back"])
def test_an_interrupted_clear_is_completed_by_the_next(store, monkeypatch, step):
    named_memory = store.named_memory
    named_memory.array("numbers", 3, "int8")[...] = 7

    def interrupt(*_):
        raise KeyboardInterrupt

    owner = named_memory if step == "_forget" else named_memory.memory
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, step.rpartition(".")[2], interrupt)
        named_memory.clear()
    named_memory.clear()
    assert named_memory.array("numbers", 3, "int8").tolist() == [0] * 3


def test_a_forked_process_neither_has_nor_gives_back_the_locks_of_a_rank(store):
    lock = store.named_memory.lock(5)
    assert lock.try_acquire()

    def use():
        assert not lock.is_free() and not lock.try_acquire()
        with pytest.raises(RuntimeError, match="not held by this rank"):
            lock.release()
        store.named_memory.release_locks()
        os.close(store.named_memory._file.number)

    with child(use) as forked, child(lambda: lock.try_acquire() and os._exit(1)):
        kill(forked)
        assert not lock.is_free() and not lock.try_acquire()
    lock.release()
    assert lock.is_free()


def test_a_forked_process_gets_arrays_but_creates_none(store):
    there = store.named_memory.array("there", 3, "int8")

    def use():
        store.named_memory.array("there", 3, "int8")[...] = 5
        with pytest.raises(SynkhronosError, match="was forked"):
            store.named_memory.array("new", 3, "int8")

    with child(use):
        assert there.tolist() == [5] * 3


@pytest.mark.parametrize("step", ["allocate_pages", "record"])
def test_a_rank_that_dies_while_it_creates_an_array_leaves_the_directory_as_it_was(store, step):
    named_memory, memory = store.named_memory, store.memory
    before = named_memory.array("before", 100_000, "int8")
    before[...] = 1

    def create():
        if step == "record":  # it is written, but does not count yet
            named_memory._header = type("Header", (), {"__getitem__": lambda _, key: header[key],
                                                  "__setitem__": die})()  # fmt: skip
        else:
            memory.allocate_pages = die
        named_memory.array("new", 100_000, "int8")

    header = named_memory._header
    assert end(begin(as_rank, store, 1, create)) == signal.SIGKILL
    new = named_memory.array("another", (50, 5000), "int8")
    assert not new.any()
    new[...] = 2
    assert set(before.tolist()) == {1}
    assert not named_memory.array("new", 100_000, "int8").any()


def test_the_pages_of_an_array_are_allocated_while_there_is_memory(store, monkeypatch):
    left = [200 * MEBIBYTE]
    monkeypatch.setattr(memory_module, "_memory_left", lambda: left[0])
    store.named_memory.array("a", 64 * MEBIBYTE, "uint8")
    left[0] = 100 * MEBIBYTE
    with pytest.raises(MemoryError, match=r"\d+ bytes were requested, \d+ are left"):
        store.named_memory.array("b", 64 * MEBIBYTE, "uint8")
    with pytest.raises(MemoryError, match="of what can be addressed"):
        store.named_memory.array("b", 1 << 60, "uint8")
    left[0] = 200 * MEBIBYTE
    assert not store.named_memory.array("b", (64, MEBIBYTE), "uint8").any()


def test_a_directory_that_is_full_is_an_error_in_words(store):
    store.named_memory._end_of_log = store.named_memory._log + 200
    with pytest.raises(MemoryError, match="use fewer or smaller arrays"):
        for number in range(10):
            store.named_memory.array(f"{number}", 3, "int8")


def test_without_memfd_the_locks_are_in_a_file_without_a_name(monkeypatch, tmp_path):
    def fail(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = SharedMemoryStore(SharedMemory(2))
    assert not list(tmp_path.iterdir())
    lock = store.named_memory.lock(1)
    with child(lock.try_acquire):
        assert not lock.try_acquire()
    assert lock.try_acquire()
