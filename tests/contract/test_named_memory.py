"""Conformance checks on the named memory of each store, and tests of ranks that die in them."""

import os
import signal

import pytest
from checks.children import as_rank, begin, child, die, end, kill
from checks.named_memory import CHECKS

from synkhronos._errors import SynkhronosError
from synkhronos.stores import named_memory as module
from synkhronos.stores import memory as memory_module
from synkhronos.stores.memory import SharedMemory
from synkhronos.stores.base import SharedMemoryStore

MEBIBYTE = 1 << 20


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[len("check_") :])
def test_named_memory(check, ranks):
    check(ranks)


# In shared memory


@pytest.fixture
def store():
    return SharedMemoryStore(SharedMemory(2))


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

    with named_memory.pausing(stop_waiting), child(
        lambda: named_memory._file.try_acquire(module._DIRECTORY)
    ) as holder:
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
        os.close(store.named_memory._file._number)

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

    monkeypatch.setattr(module.os, "memfd_create", fail)
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    store = SharedMemoryStore(SharedMemory(2))
    assert not list(tmp_path.iterdir())
    lock = store.named_memory.lock(1)
    with child(lock.try_acquire):
        assert not lock.try_acquire()
    assert lock.try_acquire()
