"""Conformance checks on each store, and tests of shared memory: its blocks, pages and limits."""

import gc
import re

import numpy as np
import pytest
from checks.stores import CHECKS
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from oracle import examples

from synkhronos.stores import memory as memory_module
from synkhronos.stores.memory import FreeList, SharedMemory
from synkhronos.stores.shared import SharedMemoryStore

MEBIBYTE = 1 << 20


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[len("check_"):])
def test_store(check, ranks, tmp_path):
    wants_path = "path" in check.__code__.co_varnames[: check.__code__.co_argcount]
    check(ranks, tmp_path / "array") if wants_path else check(ranks)


# In shared memory


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


def test_rows_that_are_a_range_are_a_view(store):
    array = store.empty((10, 3), "int32")
    handle = store.put(array)
    assert np.shares_memory(store.rows(handle, range(2, 9, 3)), array)
    assert not np.shares_memory(store.rows(handle, np.array([2, 5])), array)


def test_what_is_in_the_memory_is_placed_without_a_copy_and_other_layouts_with_one(store):
    array = store.empty((4, 6), "float64")
    array[...] = np.arange(24).reshape(4, 6)
    assert store.place(array) is array
    assert store.place(array[1:3]).ctypes.data == array[1:3].ctypes.data
    for other in (array.T, array[:, ::2], array[::-1], array + 0):
        placed = store.place(other)
        assert not np.shares_memory(placed, array)
        np.testing.assert_array_equal(placed, other)
        assert placed in store


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


def test_a_freed_handle_keeps_no_memory(store):
    handle = store.put(np.ones(1000))
    address = store.get(handle).ctypes.data
    store.free(handle)
    gc.collect()
    assert store.empty((1000,), "float64").ctypes.data == address


@given(actions=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 1, 63, 64, 65, 5000, 70000])),
                        max_size=40))
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


def test_many_blocks_of_growing_size_reuse_the_memory_of_those_that_died(store):
    lowest = store.empty((1000,), "float64").ctypes.data
    highest = 0
    for step in range(200):
        array = store.empty((1000 + 100 * step,), "float64")
        highest = max(highest, array.ctypes.data + array.nbytes - lowest)
    assert highest < 3 * array.nbytes + (1 << 16)


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


def test_pages_that_were_returned_are_zero(monkeypatch):
    monkeypatch.setattr(memory_module, "_KEPT", MEBIBYTE)
    store = SharedMemoryStore(SharedMemory(2))
    array = store.empty((8 * MEBIBYTE,), "uint8")
    array[:] = 1
    handle = store.put(array)
    del array
    gc.collect()
    store.collect()
    assert not store.get(handle).any()


def test_the_pages_of_a_large_block_are_allocated_at_once(memory):
    """Thus other allocations, including allocations by other ranks, see how much memory is left."""
    before = resident(memory)
    block = memory.allocate(48 * MEBIBYTE)
    assert resident(memory) - before >= block.nbytes


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


def test_pages_that_are_kept_are_not_asked_for_again(memory, monkeypatch):
    memory.allocate(64 * MEBIBYTE)
    gc.collect()
    monkeypatch.setattr(memory_module, "_memory_left", lambda: 0)
    memory.allocate(64 * MEBIBYTE)
    with pytest.raises(MemoryError):
        memory.allocate(65 * MEBIBYTE)


def test_more_memory_than_there_is_is_a_memory_error_and_the_rest_is_usable(memory):
    for nbytes in (1 << 45, 1 << 60):
        with pytest.raises(MemoryError, match="shared memory"):
            memory.allocate(nbytes)
    memory.allocate(100)[:] = 1


def test_ranks_allocate_in_spans_of_their_own(memory):
    first = memory.allocate(1000)
    memory.use_span(1)
    second = memory.allocate(1000)
    assert abs(first.ctypes.data - second.ctypes.data) == memory._span
    del first  # returns to the former span and not to this one
    gc.collect()
    third = memory.allocate(1000)
    assert third.ctypes.data > second.ctypes.data


@pytest.mark.parametrize("nbytes", [1, 63, 64, 4031, 4032, 4033, 4095, 4096, 4097, 10_000])
def test_blocks_of_about_a_page_return_to_where_they_came_from(memory, nbytes):
    before = memory._small.holes(), memory._large.holes()
    for _ in range(3):
        memory.allocate(nbytes)
        memory.trim()
    assert (memory._small.holes(), memory._large.holes()) == before


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
        fits = [byte for byte in range(len(self.is_free) - nbytes + 1)
                if all(self.is_free[byte : byte + nbytes])]
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

    @invariant()
    def neighbours_are_merged(self):
        edges = [self.is_free[k] != self.is_free[k - 1] for k in range(1, len(self.is_free))]
        assert 2 * len(self.free.holes()) == sum(edges)


def test_a_free_list_gives_the_first_bytes_that_fit_and_merges_neighbours():
    run_state_machine_as_test(FreeBytes, settings=examples(60))
