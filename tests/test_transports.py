"""The local transport: commands to workers, barriers and exchanges among ranks, shared memory."""

import gc
import os
import pickle
import signal
import time

import numpy as np
import pytest
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

from synkhronos._errors import CollectiveAbortedError, WorldBrokenError
from synkhronos.transports import shm
from synkhronos.transports.box import Box
from synkhronos.transports.local import LocalTransport
from synkhronos.transports.shm import FreeList, SharedMemory

WORLDS = [(1, 0), (2, 0), (2, 1), (3, 1), (5, 4)]


class Ranks:
    """Ranks that call ``program(transport, *args)``; programs and arguments are pickled."""

    def __init__(self, size, master_rank, **kwargs):
        self.size = size
        self.transport = LocalTransport(size, master_rank, **{"timeout": 30, **kwargs})
        if size > 1:
            self.transport.start(self._serve)

    def _serve(self):
        while True:
            payload = self.transport.receive()
            if payload == b"":
                return
            self.transport.reply(pickle.dumps(self._attempt(payload)))

    def _attempt(self, payload):
        program, args = pickle.loads(payload)
        try:
            return program(self.transport, *args)
        except (ZeroDivisionError, CollectiveAbortedError) as error:
            if isinstance(error, ZeroDivisionError):
                self.transport.abort()
            return type(error)

    def run(self, program, *args):
        payload = pickle.dumps((program, args))
        self.transport.post(payload)
        own = self._attempt(payload)
        replies = self.transport.collect()
        assert [reply is None for reply in replies] == [
            rank == self.transport.rank for rank in range(self.size)]
        results = [reply and pickle.loads(reply) for reply in replies]
        results[self.transport.rank] = own
        return results

    def close(self):
        self.transport.post(b"")
        self.transport.close(5)


@pytest.fixture(scope="module", params=WORLDS, ids=lambda w: f"{w[0]}-ranks-master-{w[1]}")
def ranks(request):
    ranks = Ranks(*request.param)
    yield ranks
    ranks.close()


# Programs


def identify(transport):
    return transport.rank, transport.size, transport.master_rank, transport.is_master_process()


def echo(transport, payload, factor):
    return payload * factor + bytes([transport.rank])


def exchange(transport, lengths):
    """Exchange items of these lengths, one after the other; return what came, for each."""
    received = []
    for turn, length in enumerate(lengths):
        item = bytes([transport.rank, turn]) * (length + transport.rank)
        received.append(transport.exchange(item))
    return [[(len(item), item[:2], item == item[:2] * (len(item) // 2)) for item in items]
            for items in received]


def wait_for_the_slowest(transport, slowest, pause):
    if transport.rank == slowest:
        time.sleep(pause)
    entered = time.monotonic()
    transport.barrier()
    return entered, time.monotonic()


def fail(transport, failing, before, after):
    """Pass some barriers, fail on some ranks, let the others go on to more of them."""
    for _ in range(before):
        transport.exchange(b"before")
    if transport.rank in failing:
        raise ZeroDivisionError
    for _ in range(after):
        transport.exchange(b"after")
    return "passed"


def place(transport, turn):
    """Allocate on every rank, write, and read what the others wrote."""
    memory = transport.memory
    own = memory.place(np.full((50 + turn, 3), transport.rank, "int32"))
    references = transport.exchange(pickle.dumps(memory.reference(own)))
    arrays = [memory.open(pickle.loads(reference)) for reference in references]
    values = [(array.shape, set(array.ravel().tolist())) for array in arrays]
    transport.barrier()
    for array in arrays:
        array[transport.rank] = 100 + transport.rank
    transport.barrier()
    return values, own[: transport.size].tolist()


def fill_span(transport, nbytes):
    """Allocate more than the master did, so that ranks that shared a span would meet."""
    block = transport.memory.allocate(nbytes)
    block[:] = transport.rank
    transport.barrier()
    return set(block.tolist())


# Checks


def test_every_rank_knows_itself(ranks):
    master = ranks.transport.master_rank
    assert ranks.run(identify) == [(r, ranks.size, master, r == master) for r in range(ranks.size)]


@pytest.mark.parametrize("length", [0, 1, 1000, (1 << 16) - 1, 1 << 16, (1 << 20) + 1, 5 << 20])
def test_payloads_and_replies_of_any_length_arrive(ranks, length):
    for payload, factor in ((b"ab" * length, 1), (b"x", length)):
        got = ranks.run(echo, payload, factor)
        assert got == [payload * factor + bytes([rank]) for rank in range(ranks.size)]
    assert ranks.run(echo, b"y", 3) == [b"yyy" + bytes([rank]) for rank in range(ranks.size)]


@given(lengths=st.lists(st.sampled_from([0, 1, 7, 32_700, 32_768, 40_000, 200_000]), max_size=8))
@examples(25)
def test_items_of_any_length_are_exchanged_in_order(ranks, lengths):
    got = ranks.run(exchange, lengths)
    expected = [
        [(2 * (length + rank), bytes([rank, turn])[: 2 * (length + rank)], True)
         for rank in range(ranks.size)]
        for turn, length in enumerate(lengths)
    ]
    assert got == [expected] * ranks.size


def test_nobody_leaves_a_barrier_before_the_last_one_enters_it(ranks):
    for slowest in range(ranks.size):
        times = ranks.run(wait_for_the_slowest, slowest, 0.02)
        assert min(left for _, left in times) >= max(entered for entered, _ in times)


@given(data=st.data(), before=st.integers(0, 3), after=st.integers(0, 3))
@examples(40)
def test_ranks_leave_the_barrier_that_a_failed_one_never_reaches(ranks, data, before, after):
    failing = data.draw(st.sets(st.integers(0, ranks.size - 1), min_size=1))
    results = ranks.run(fail, failing, before, after)
    for rank, result in enumerate(results):
        if rank in failing:
            assert result is ZeroDivisionError
        else:
            assert result == ("passed" if not after else CollectiveAbortedError)
    lengths = [3, 50_000]
    assert all(len(one) == 2 for one in ranks.run(exchange, lengths))
    assert ranks.run(fail, set(), 3, 2) == ["passed"] * ranks.size


def test_every_rank_reads_and_writes_what_another_placed(ranks):
    for turn in range(20):
        for values, own in ranks.run(place, turn):
            assert values == [((50 + turn, 3), {rank}) for rank in range(ranks.size)]
            assert own == [[100 + rank] * 3 for rank in range(ranks.size)]


def test_memory_of_one_rank_is_never_another_ranks(ranks):
    kept = ranks.transport.memory.empty((1 << 21,), "uint8")
    kept[:] = 77
    assert ranks.run(fill_span, 3 << 20) == [{rank} for rank in range(ranks.size)]
    assert set(kept.tolist()) == {77}


# A worker's death


def die(transport, rank, how):
    if transport.rank == rank:
        if how == "slow exit":  # the sentinel, a pipe, is closed before the process has ended
            os.closerange(3, 1024)
            time.sleep(0.5)
        if how.endswith("exit"):
            os._exit(7)
        os.kill(os.getpid(), 9)
    transport.barrier()


def sleep(transport):
    time.sleep(5 if transport.rank == 1 else 0)


@pytest.mark.parametrize(
    "how, cause", [("exit", "exit code 7"), ("slow exit", "exit code 7"), ("kill", "SIGKILL")]
)
def test_the_death_of_a_worker_breaks_the_world_and_ends_the_others(how, cause):
    ranks = Ranks(3, 0)
    began = time.monotonic()
    with pytest.raises(WorldBrokenError, match=f"rank 2 .*{cause}"):
        ranks.run(die, 2, how)
    assert time.monotonic() - began < 2
    ranks.transport.close(1)


def test_a_barrier_that_lasts_too_long_breaks_the_world():
    ranks = Ranks(2, 0, timeout=0.3)
    began = time.monotonic()
    with pytest.raises(WorldBrokenError, match=r"timeout=0.3.*rank 1 \(running, computing"):
        ranks.run(sleep)
    assert time.monotonic() - began < 2
    ranks.transport.close(1)


def sleep_in_turn(transport, inside):
    """Rank 1 comes after 0.8 seconds, rank 2 after 1.6: neither alone is long."""
    transport.barrier()
    time.sleep(0.8 * transport.rank)
    if inside:
        transport.barrier()


@pytest.mark.parametrize("inside", [False, True])
def test_all_waits_of_a_barrier_count_together_and_who_is_late_is_named(inside):
    ranks = Ranks(3, 0, timeout=1.1)
    with pytest.raises(WorldBrokenError, match=r"for rank 2 \(running, after barrier 1 of") as raised:
        ranks.run(sleep_in_turn, inside)
    assert "rank 1 " not in str(raised.value)
    ranks.transport.close(1)


def test_a_death_is_seen_in_a_script_with_a_timer():
    """Its signals end each wait before it is time to look."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    ranks = Ranks(2, 0)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        began = time.monotonic()
        with pytest.raises(WorldBrokenError, match=r"rank 1 \(killed by SIGKILL"):
            ranks.run(die, 1, "kill")
        assert time.monotonic() - began < 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        ranks.transport.close(1)


# Memory


class FreeBytes(RuleBasedStateMachine):
    """`FreeList` against a list with an entry a byte."""

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


@pytest.fixture
def memory():
    return SharedMemory(2)


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "float32", "complex128"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (3, 4), (70, 80)])
def test_an_array_is_the_same_through_its_reference(memory, dtype, shape):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    placed = memory.place(np.asarray(array))
    opened = memory.open(memory.reference(placed))
    assert opened.dtype == dtype and opened.shape == shape
    np.testing.assert_array_equal(opened, array)
    assert opened.flags.writeable and opened.flags.c_contiguous
    assert opened.ctypes.data == placed.ctypes.data
    assert placed.ctypes.data % 64 == 0
    placed[...] = 1
    np.testing.assert_array_equal(opened, np.ones(shape))


def test_what_lies_in_the_memory_is_placed_without_a_copy_and_other_layouts_with_one(memory):
    array = memory.empty((4, 6), "float64")
    array[...] = np.arange(24).reshape(4, 6)
    assert memory.place(array) is array
    assert memory.place(array[1:3]).ctypes.data == array[1:3].ctypes.data
    for other in (array.T, array[:, ::2], array[::-1], array + 0):
        placed = memory.place(other)
        assert not np.shares_memory(placed, array)
        np.testing.assert_array_equal(placed, other)
        assert placed in memory


def test_memory_comes_back_when_the_last_view_of_it_dies(memory):
    array = memory.empty((1000,), "float64")
    view = array[10:20].reshape(2, 5)
    address = array.ctypes.data
    del array
    gc.collect()
    others = [memory.empty((1000,), "float64") for _ in range(3)]
    assert address not in [other.ctypes.data for other in others]
    del view
    gc.collect()
    assert memory.empty((1000,), "float64").ctypes.data == address


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


def test_many_blocks_of_growing_size_reuse_the_memory_that_came_back(memory):
    lowest = memory.empty((1000,), "float64").ctypes.data
    highest = 0
    for step in range(200):
        array = memory.empty((1000 + 100 * step,), "float64")
        highest = max(highest, array.ctypes.data + array.nbytes - lowest)
    assert highest < 3 * array.nbytes + (1 << 16)


def test_pages_that_came_back_go_back_to_the_system(monkeypatch):
    monkeypatch.setattr(shm, "_KEPT", 1 << 20)
    memory = SharedMemory(2)
    array = memory.empty((8 << 20,), "uint8")
    array[:] = 1
    reference = memory.reference(array)
    del array
    gc.collect()
    memory.collect()
    assert not memory.open(reference).any()  # new pages are zero


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
    del first  # a block of the former span does not come back here
    gc.collect()
    third = memory.allocate(1000)
    assert third.ctypes.data > second.ctypes.data


@pytest.mark.parametrize("nbytes", [1, 63, 64, 4031, 4032, 4033, 4095, 4096, 4097, 10_000])
def test_blocks_of_about_a_page_go_back_where_they_came_from(memory, nbytes):
    before = memory._small.holes(), memory._large.holes()
    for _ in range(3):
        memory.allocate(nbytes)
        memory.trim()
    assert (memory._small.holes(), memory._large.holes()) == before


# What is put in may be the very object of the last time, an equal one, or another of its length.
PAYLOADS = [b"", b"some", bytes(bytearray(b"some")), b"more", b"long" * 8, b"long" * 9]


@examples(200)
@given(payloads=st.lists(st.sampled_from(range(len(PAYLOADS)))), clears=st.booleans())
def test_what_was_put_in_a_box_last_is_in_it(payloads, clears):
    box = Box(SharedMemory(1), 16)
    for payload in payloads:
        box.put(PAYLOADS[payload])
        assert box.get() == PAYLOADS[payload]
        if clears:
            box.clear()


def test_a_box_keeps_what_it_had_if_there_is_no_room_for_more(memory, monkeypatch):
    box = Box(memory, 16)
    box.put(PAYLOADS[1])

    def refuse(nbytes):
        raise MemoryError

    monkeypatch.setattr(memory, "allocate", refuse)
    with pytest.raises(MemoryError):
        box.put(PAYLOADS[4])
    assert box.get() == PAYLOADS[1]
    box.put(PAYLOADS[1])
    assert box.get() == PAYLOADS[1]
