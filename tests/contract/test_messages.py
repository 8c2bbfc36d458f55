"""Tests of messages: their order and contents, full boxes, and ranks that die in `send` or `receive`."""

import os
import signal
import time
import zlib

import numpy as np
import pytest
from checks.children import as_rank, begin, die, end, kill, wait_until

from synkhronos.services import messages
from synkhronos.services.messages import Mailbox, Messages
from synkhronos.stores.memory import SharedMemory
from specifications.store import NaiveNamedMemory
from synkhronos.stores.base import SharedMemoryStore

CHUNK = 4096


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(messages, "_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(messages, "BOX_BYTES", 64 * CHUNK)


@pytest.fixture
def store():
    return SharedMemoryStore(SharedMemory(4))


@pytest.fixture(params=["naive", "shared"])
def named_memory(request, store):
    return NaiveNamedMemory() if request.param == "naive" else store.named_memory


@pytest.fixture
def ranks(named_memory):
    return [Messages(named_memory, rank, 3) for rank in range(3)]


GRID = np.arange(24.0).reshape(4, 6)
ARRAYS = [GRID.T, GRID[:, ::2], GRID[::-1], np.broadcast_to(np.float32(3), (2, 5)), np.int8(7),
          np.array(7, "int8"), np.zeros((0, 3), ">f4"), np.arange(9, dtype=">i2"), np.ones(3, bool),
          np.arange(4, dtype="c8"), np.random.default_rng(0).random((5, 3000)), np.longdouble(2),
          np.float16([1, np.nan])]  # fmt: skip


def assert_equal(got, sent):
    sent = np.asarray(sent)
    assert (got.shape, got.dtype) == (sent.shape, sent.dtype) and got.flags.carray
    np.testing.assert_array_equal(got, sent)


def test_arrays_arrive_as_they_were_sent(ranks):
    first, second, _ = ranks
    assert first.send(1, ARRAYS)
    source, got = second.receive()
    assert source == 0 and len(got) == len(ARRAYS)
    for one, array in zip(got, ARRAYS):
        assert_equal(one, array)
    for one in (*ARRAYS, 3.5, 2, True, [[1, 2]], []):
        assert second.send(0, one)
        source, got = first.receive()
        if isinstance(one, list):
            assert source == 1 and isinstance(got, list) and len(got) == len(one)
        else:
            assert source == 1
            assert_equal(got, one)
    sent = np.zeros(3)
    first.send(1, sent)
    sent[...] = 1
    _, got = second.receive()
    first.send(1, sent)
    assert got.tolist() == [0] * 3  # a copy


def test_the_oldest_message_with_a_tag_comes_first(ranks):
    sent = [(0, 5), (2, 0), (0, 0), (1, 5), (2, 5), (0, -1)]
    for number, (source, tag) in enumerate(sent):
        assert ranks[source].send(1, number, tag)
    assert ranks[1].receive(4) is None and ranks[0].receive() is None
    for tag in (5, 0, -1):
        expected = [(source, number) for number, (source, one) in enumerate(sent) if one == tag]
        assert [ranks[1].receive(tag) for _ in expected] == expected
        assert ranks[1].receive(tag) is None


def test_a_full_box_says_so_and_loses_nothing(ranks):
    first, second, third = ranks
    sent = [first.send(1, number) for number in range(10)]
    assert sent == [True] * 8 + [False] * 2
    assert not third.send(1, 99) and third.send(0, 99)
    assert second.receive() == (0, 0)
    assert third.send(1, 8)
    assert [int(second.receive()[1]) for _ in range(8)] == list(range(1, 9))
    assert second.receive() is None


def test_a_box_has_a_bound_in_bytes(ranks):
    first, second, third = ranks
    half = np.ones(33 * CHUNK, "uint8")
    assert first.send(1, half) and not third.send(1, half) and third.send(2, half)
    assert third.send(1, half[: 20 * CHUNK])
    with pytest.raises(ValueError, match=r"\d+ bytes is larger than a mailbox, .* 262144; send it in"):
        first.send(1, np.zeros(64 * CHUNK, "uint8"))
    assert second.receive()[1].sum() == half.size and second.receive()[1].sum() == 20 * CHUNK
    assert first.send(1, half)


def test_wrong_arguments_are_refused_in_words(ranks):
    one = ranks[0]
    for call, error, words in (
        (lambda: one.send(3, 1), ValueError, "a rank in 0..2, got 3"),
        (lambda: one.send(-1, 1), ValueError, "a rank in 0..2, got -1"),
        (lambda: one.send("1", 1), TypeError, "the receiver's rank, an integer, got '1'"),
        (lambda: one.send(1, 1, tag=0.5), TypeError, "a tag, an integer, got 0.5"),
        (lambda: one.send(1, 1, tag=1 << 63), ValueError, "64 bits"),
        (lambda: one.receive("a"), TypeError, "a tag"),
        (lambda: one.send(1, "text"), TypeError, "an array of numbers, .* got str of the dtype <U4"),
        (lambda: one.send(1, {"a": 1}), TypeError, "got dict"),
        (lambda: one.send(1, [1, None]), TypeError, "got NoneType"),
        (lambda: one.wait(-1), ValueError, "got -1"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert ranks[1].receive() is None


def test_a_message_that_cannot_be_written_or_read_leaves_the_box_as_it_was(ranks, monkeypatch):
    first, second, _ = ranks
    first.send(1, 1)

    def fail(*_):
        raise MemoryError

    for method, call in (("write", lambda: first.send(1, 2)), ("read", second.receive)):
        with monkeypatch.context() as patch:
            patch.setattr(Mailbox, method, fail)
            for _ in range(9):
                with pytest.raises(MemoryError):
                    call()
    assert second.receive() == (0, 1) and second.receive() is None


def test_a_wait_ends_with_a_message_or_when_its_time_is_up(store):
    own = Messages(store.named_memory, 0, 2)

    def send_later():
        other = Messages(store.named_memory, 1, 2)
        time.sleep(0.2)
        assert other.send(0, 5)

    began, used = time.monotonic(), time.process_time()
    own.wait(0.1)
    assert time.monotonic() - began >= 0.1
    other = begin(as_rank, store, 1, send_later)
    while (message := own.receive()) is None:
        own.wait(30)
    assert message == (1, 5)
    assert time.monotonic() - began < 20 and time.process_time() - used < 0.1
    assert end(other) == 0
    own.send(0, 1)
    own.wait(30)  # it has arrived before
    assert own.receive() == (0, 1)


def talk(store, rank, times):
    """Send arrays to the other ranks, in any order; check what arrives, until all of it has."""
    own = Messages(store.named_memory, rank, 4)
    random = np.random.default_rng(rank)
    others = [other for other in range(4) if other != rank]
    sent, got = dict.fromkeys(others, 0), dict.fromkeys(others, 0)
    until = time.monotonic() + 60
    while sum(sent.values()) + sum(got.values()) < 6 * times:
        assert time.monotonic() < until, "another rank has failed"
        message = own.receive()
        if message is not None:
            source, [number, check, *arrays] = message
            assert number == got[source], f"from {source}: {number}, expected {got[source]}"
            assert check == zlib.crc32(b"".join(one.tobytes() for one in arrays))
            got[source] += 1
        to = random.choice(others)
        if sent[to] < times:
            arrays = [random.integers(0, 256, random.integers(3 * CHUNK), "uint8") for _ in range(2)]
            check = zlib.crc32(b"".join(one.tobytes() for one in arrays))
            sent[to] += own.send(to, [sent[to], check, *arrays])
        elif message is None:
            own.wait(0.01)
    assert own.receive() is None


def test_four_ranks_that_talk_at_once_lose_and_tear_nothing(store):
    ranks = [begin(as_rank, store, rank, talk, store, rank, 40) for rank in range(4)]
    try:
        assert [end(pid) for pid in ranks] == [0] * 4
    finally:
        for pid in ranks:
            kill(pid)


def at_the_third_chunk(call):
    """Call a function when a message is to be copied to or from its third chunk."""
    places = Mailbox._places

    def counted(self, slot, parts):
        for number, place in enumerate(places(self, slot, parts)):
            if number == 3:
                call()
            yield place

    Mailbox._places = counted


def send_and(store, call):
    at_the_third_chunk(call)
    Messages(store.named_memory, 1, 3).send(0, np.ones(10 * CHUNK, "uint8"))


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def test_what_a_killed_rank_was_writing_is_discarded(store):
    own, other = Messages(store.named_memory, 0, 3), Messages(store.named_memory, 2, 3)
    for _ in range(10):  # more often than there are slots and chunks
        assert end(begin(as_rank, store, 1, send_and, store, die)) == signal.SIGKILL
    assert own.receive() is None
    large = np.arange(50 * CHUNK) % 7
    assert other.send(0, large.astype("int8"))
    assert [other.send(0, number) for number in range(8)] == [True] * 7 + [False]
    assert_equal(own.receive()[1], large.astype("int8"))
    assert [int(own.receive()[1]) for _ in range(7)] == list(range(7))


def test_a_send_ends_if_the_box_stays_locked_and_the_program_has_to_end(store, monkeypatch):
    own, other = Messages(store.named_memory, 0, 3), Messages(store.named_memory, 1, 3)
    write = Mailbox.write

    def stop_waiting():
        raise TimeoutError

    def write_and_lock(box, slot, parts):
        write(box, slot, parts)
        assert box._lock.try_acquire()  # as a rank that is stopped then

    pausing = store.named_memory.pausing(stop_waiting)
    with monkeypatch.context() as patch, pausing, pytest.raises(TimeoutError):
        patch.setattr(Mailbox, "write", write_and_lock)
        other.send(0, 1)
    other._box(0)._lock.release()
    assert [other.send(0, number) for number in range(9)] == [True] * 8 + [False]
    assert [int(own.receive()[1]) for _ in range(8)] == list(range(8))
    [bells] = store.named_memory.locks("mailbox bells", 1)
    bells.try_acquire()
    with store.named_memory.pausing(stop_waiting), pytest.raises(TimeoutError):
        Messages(store.named_memory, 2, 3)


def test_nobody_waits_for_a_stopped_sender(store):
    own, other = Messages(store.named_memory, 0, 3), Messages(store.named_memory, 2, 3)
    stopped = begin(as_rank, store, 1, send_and, store, stop)
    try:
        assert os.WIFSTOPPED(os.waitpid(stopped, os.WUNTRACED)[1])
        for number in range(20):
            assert other.send(0, number) and own.receive() == (2, number)
        os.kill(stopped, signal.SIGCONT)
        assert end(stopped) == 0
        source, got = own.receive()
        assert source == 1 and got.sum() == 10 * CHUNK
    finally:
        kill(stopped)


def receive_and(store, call):
    at_the_third_chunk(call)
    Messages(store.named_memory, 0, 3).receive()


def test_what_a_killed_rank_was_reading_is_received_once_by_the_next(store):
    other = Messages(store.named_memory, 1, 3)
    sent = [np.full(10 * CHUNK, number, "uint8") for number in range(3)]
    for array in sent[:2]:
        assert other.send(0, array)
    assert end(begin(as_rank, store, 2, receive_and, store, die)) == signal.SIGKILL
    assert other.send(0, sent[2])
    fresh = Messages(store.named_memory, 0, 3)
    for array in sent:
        assert_equal(fresh.receive()[1], array)
    assert fresh.receive() is None


def send_on(store, rank, done):
    own = Messages(store.named_memory, rank, 4)
    while True:
        number = done[rank]
        done[rank] += own.send(0, np.full((3, CHUNK), number))


def receive_on(store, done):
    own = Messages(store.named_memory, 0, 4)
    while True:
        message = own.receive()
        if message is None:
            own.wait(0.01)
        else:
            check(message, done)
            done[0] += 1


def check(message, numbers):
    """Check that a message is whole, and is the next one from its source, or the next but one."""
    source, array = message
    [number] = set(array.reshape(-1).tolist())
    numbers[10 + source], former = number, numbers[10 + source]
    assert number in (former + 1, former + 2), (number, former)
    return number - former


@pytest.mark.parametrize("moment", [0.0, 0.003, 0.007])
def test_ranks_killed_at_any_moment_lose_at_most_the_message_in_their_hands(store, moment):
    done = store.named_memory.array("done", 20, "int64")
    done[10:] = -1
    processes = {rank: begin(as_rank, store, rank, send_on, store, rank, done) for rank in (1, 2)}
    processes[0] = begin(as_rank, store, 3, receive_on, store, done)
    try:
        wait_until(lambda: done[0] >= 30)
        for rank in (1, 0, 2):
            time.sleep(moment)
            kill(processes[rank])
        own, skipped = Messages(store.named_memory, 0, 4), 0
        while (message := own.receive()) is not None:
            skipped += check(message, done) - 1
        # The receiver had at most one message in its hands. A killed sender has counted all messages
        # but perhaps the last.
        assert skipped <= 1
        assert all(done[10 + rank] + 1 - done[rank] in (-1, 0, 1) for rank in (1, 2))
        assert all([own.send(0, number) for number in range(8)])
    finally:
        for pid in processes.values():
            kill(pid)
