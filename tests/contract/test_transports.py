"""Conformance checks on each transport, and tests of time-outs and of dying workers."""

import functools
import os
import pickle
import signal
import threading
import time

import pytest
from checks.ranks import Outcome, Ranks
from checks.transports import CHECKS
from hypothesis import given, strategies as st
from oracle import examples

from synkhronos._errors import SynkhronosError, WorldBrokenError
from synkhronos.stores.memory import SharedMemory
from synkhronos.transports.local import LocalTransport
from synkhronos.transports.mailbox import Mailbox
from synkhronos.transports.waiting import BarrierProgress
from specifications.transport import NaiveTransport
from synkhronos.transports.tree import RADIX, TreeTransport

TRANSPORTS = [NaiveTransport, LocalTransport]
WORLDS = [(1, 0), (2, 0), (2, 1), (3, 1), (5, 4)]
TREES = [(12, 5, RADIX), (8, 2, 2)]  # the last has two levels of workers that start others


@pytest.fixture(
    scope="module",
    params=[(make, *world) for make in TRANSPORTS for world in WORLDS]
    + [(functools.partial(TreeTransport, radix=radix), *world) for *world, radix in TREES],
    ids=lambda param: f"{getattr(param[0], '__name__', 'Tree')}-{param[1]}-ranks-master-{param[2]}",
)
def ranks(request):
    make, size, master_rank = request.param
    ranks = Ranks(make(size, master_rank, timeout=30))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[len("check_") :])
def test_transport(check, ranks):
    check(ranks)


@pytest.mark.parametrize("make", TRANSPORTS, ids=lambda make: make.__name__)
def test_a_successor_has_other_ranks_in_the_same_store(make):
    ranks = Ranks(make(3, 0, timeout=30))
    store = ranks.transport.store
    ranks.close()
    successor = Ranks(ranks.transport.successor(2, 1))
    assert successor.transport.store is store and successor.transport.timeout == 30
    assert successor.values(number) == [0, 1]
    successor.close()


def number(transport):
    return transport.rank


def fill(transport, value):
    transport.store.memory.allocate(5000)[...] = value


def test_an_attendant_has_memory_of_its_own():
    ranks = Ranks(LocalTransport(3, 0, timeout=30))
    store = ranks.transport.store
    words = store.named_memory.array("words", (3,), "int64")

    def wait_for(position):
        limit = time.monotonic() + 20
        while not words[position] and time.monotonic() < limit:
            time.sleep(0.01)

    def serve():
        own = store.memory.allocate(5000)
        own[...] = 9
        words[0] = 1
        wait_for(1)
        words[2] = own.min() if own.min() == own.max() else -1

    service_process = ranks.transport.attend("filler", serve)
    wait_for(0)
    ranks.values(fill, 5)
    words[1] = 1
    wait_for(2)
    service_process.end(5)
    ranks.close()
    assert words.tolist() == [1, 1, 9]


def itself(transport):
    return transport


def nap(transport, seconds):
    time.sleep(seconds if transport.rank == 1 else 0)


@pytest.mark.parametrize("make", TRANSPORTS, ids=lambda make: make.__name__)
def test_the_master_calls_a_function_while_it_waits(make):
    calls = []
    ranks = Ranks(make(2, 0, timeout=30), itself, lambda: calls.append(1))
    ranks.values(nap, 0.7)
    assert calls
    ranks.close()


@pytest.mark.parametrize("make", TRANSPORTS, ids=lambda make: make.__name__)
def test_the_master_is_told_if_another_thread_has_ended_the_workers(make):
    ranks = Ranks(make(3, 0, timeout=30))
    timer = threading.Timer(0.1, ranks.transport.kill)
    timer.start()
    began = time.monotonic()
    with pytest.raises(WorldBrokenError, match="ended from another thread"):
        ranks.run(nap, 2)
    assert time.monotonic() - began < 1.5
    timer.join()
    ranks.transport.close(0)


@pytest.mark.parametrize("make", TRANSPORTS, ids=lambda make: make.__name__)
def test_a_barrier_that_lasts_too_long_breaks_the_world(make):
    ranks = Ranks(make(2, 0, timeout=0.3))
    began = time.monotonic()
    with pytest.raises(WorldBrokenError, match="timeout=0.3.* for rank 1"):
        ranks.run(nap, 1.5)
    assert time.monotonic() - began < 1.4
    ranks.transport.close(1)


def work_long(transport, how):
    transport.begin_program()
    if transport.rank == 1:
        time.sleep(1)
    if how == "meet":
        transport.barrier()
    return transport.rank


@pytest.mark.parametrize("make", TRANSPORTS, ids=lambda make: make.__name__)
def test_a_program_may_last_longer_than_the_limit_but_no_wait_inside(make):
    ranks = Ranks(make(3, 0, timeout=0.3))
    assert ranks.values(work_long, "end apart") == [0, 1, 2]
    with pytest.raises(WorldBrokenError, match="timeout=0.3.* for rank 1"):
        ranks.run(work_long, "meet")
    ranks.transport.close(1)
    ranks = Ranks(make(3, 1, timeout=0.3))  # the late rank is the master
    outcomes = ranks.run(work_long, "meet")
    assert any("waited longer than fork(timeout=0.3)" in one.message for one in outcomes)
    ranks.close()


handlers = []  # of the deaths of workers, in the process of the master


def die_once(transport, first, path):
    transport.begin_program(handlers[-1] if transport.is_master_process() else None)
    if transport.rank in first and not os.path.exists(f"{path}{transport.rank}"):
        open(f"{path}{transport.rank}", "w").close()
        os.kill(os.getpid(), 9)
    for _ in range(100):
        transport.check()
        time.sleep(0.01)
    return transport.rank, transport.store.memory.is_ours()


@pytest.mark.parametrize("fails", [None, 0])
def test_dead_workers_are_replaced_in_a_program(tmp_path, fails):
    ranks = Ranks(LocalTransport(4, 1))
    prepared = ranks.transport.store.named_memory.array("prepared", (4,), "int64")

    def replace(dead):
        for rank, cause in dead.items():
            assert "SIGKILL" in cause

            def prepare(takes_part, rank=rank):
                assert takes_part
                prepared[rank] += 1
                if rank == fails and prepared[rank] == 1:
                    os.kill(os.getpid(), 9)
                time.sleep(0.3)  # while this one starts, the master could look at the others

            ranks.transport.replace(rank, prepare)

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    handlers.append(replace)
    expected = [(rank, True) for rank in range(4)]
    assert ranks.values(die_once, {0, 3}, str(tmp_path / "died")) == expected
    assert prepared.tolist() == [1 + (fails == 0), 0, 0, 1]
    assert ranks.values(die_once, set(), "") == expected
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked
    ranks.close()


def test_a_reply_counts_if_the_worker_dies_before_the_master_knows_of_it(monkeypatch):
    """In the last step of a reply; and when it was read, while the master waits for another one."""
    transport, finish, died = LocalTransport(3, 0), BarrierProgress.finish, []

    def finish_and_die(barriers, rank, passed):
        finish(barriers, rank, passed)
        if rank == 2 and transport.in_program:
            os.kill(os.getpid(), 9)

    def replace(dead):
        died.extend(dead)
        for rank in dead:
            transport.replace(rank, lambda takes_part: os._exit(1) if takes_part else None)

    monkeypatch.setattr(BarrierProgress, "finish", finish_and_die)
    handlers.append(replace)
    ranks = Ranks(transport)
    assert ranks.values(end_early) == [0, 1, 2]
    assert died == [1, 2]
    assert ranks.values(exchange_ranks) == [[0, 1, 2]] * 3
    ranks.close()


def end_early(transport):
    transport.begin_program(handlers[-1] if transport.is_master_process() else None)
    if transport.rank == 1:
        threading.Timer(0.3, os._exit, [3]).start()
    elif transport.rank == 0:
        time.sleep(0.1)
    else:
        time.sleep(0.8)
    return transport.rank


def exchange_ranks(transport):
    return [int(one) for one in transport.exchange(b"%d" % transport.rank)]


def meet_without_one(transport, number):
    transport.begin_program()
    if transport.rank == number:
        return "ended"
    with pytest.raises(SynkhronosError) as raised:
        transport.barrier()
    return type(raised.value).__name__


def exchange_with_a_late_one(transport, number):
    if transport.rank == number:
        time.sleep(0.2)
    return exchange_ranks(transport)


@pytest.mark.parametrize("make", TRANSPORTS, ids=lambda make: make.__name__)
def test_a_barrier_that_a_program_went_on_without_leaves_no_post_to_the_next_command(make):
    ranks = Ranks(make(4, 0, timeout=30))
    for number in range(4):
        outcomes = ranks.values(meet_without_one, number)
        assert outcomes[number] == "ended" and outcomes.count("ended") == 1
        assert ranks.values(exchange_with_a_late_one, number) == [[0, 1, 2, 3]] * 4
    ranks.close()


def stop_in_program(transport):
    transport.begin_program()
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_worker_breaks_a_program_though_a_program_may_take_any_time():
    ranks = Ranks(LocalTransport(2, 0, timeout=0.3))
    with pytest.raises(WorldBrokenError, match=r"timeout=0.3.* for rank 1 \(stopped"):
        ranks.run(stop_in_program)
    ranks.transport.close(1)


@pytest.mark.parametrize("size", [2, 3])
def test_the_master_answers_for_a_dead_worker_that_is_not_replaced(tmp_path, size):
    ranks = Ranks(LocalTransport(size, 0))

    def answer(dead):
        for rank in dead:
            ranks.transport.answer_for(rank, pickle.dumps(Outcome("dead")))

    handlers.append(answer)
    values = ranks.values(die_once, {size - 1}, str(tmp_path / "died"))
    assert values == [(rank, True) for rank in range(size - 1)] + ["dead"]
    ranks.transport.kill()


def finish(transport):
    if transport.rank == 1:
        raise SystemExit
    transport.barrier()


@pytest.mark.parametrize("make", TRANSPORTS, ids=lambda make: make.__name__)
def test_a_worker_that_ends_breaks_the_world(make):
    ranks = Ranks(make(3, 0))
    began = time.monotonic()
    with pytest.raises(WorldBrokenError, match="a worker died: rank 1"):
        ranks.run(finish)
    assert time.monotonic() - began < 2
    ranks.transport.close(1)


def die(transport, rank, how):
    if transport.rank == rank:
        if how == "slow exit":  # close the sentinel, a pipe, before the process has ended
            os.closerange(3, 1024)
            time.sleep(0.5)
        if how.endswith("exit"):
            os._exit(7)
        os.kill(os.getpid(), 9)
    transport.barrier()


@pytest.mark.parametrize(
    "how, cause", [("exit", "exit code 7"), ("slow exit", "exit code 7"), ("kill", "SIGKILL")]
)
def test_the_death_of_a_process_breaks_the_world_and_ends_the_others(how, cause):
    ranks = Ranks(LocalTransport(3, 0))
    began = time.monotonic()
    with pytest.raises(WorldBrokenError, match=f"rank 2 .*{cause}"):
        ranks.run(die, 2, how)
    assert time.monotonic() - began < 2
    ranks.transport.close(1)


def sleep_in_turn(transport, inside):
    """Make rank 1 arrive after 0.8 seconds, and rank 2 another 0.8 seconds later.

    Each wait alone is shorter than the timeout.
    """
    transport.barrier()
    time.sleep(0.8 * transport.rank)
    if inside:
        transport.barrier()


@pytest.mark.parametrize("inside", [False, True])
def test_all_waits_of_a_barrier_count_together_and_the_late_rank_is_named(inside):
    ranks = Ranks(LocalTransport(3, 0, timeout=1.1))
    late = r"for rank 2 \(running, after barrier 1 of"
    with pytest.raises(WorldBrokenError, match=late) as raised:
        ranks.run(sleep_in_turn, inside)
    assert "rank 1 " not in str(raised.value)
    ranks.transport.close(1)


def test_a_death_is_seen_in_a_script_with_a_timer():
    """The timer's signals interrupt each wait before the next check of the workers is due."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    ranks = Ranks(LocalTransport(2, 0))
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


def fill_span(transport, nbytes):
    """Allocate more memory than the master did, so that a shared span would be overwritten."""
    block = transport.store.memory.allocate(nbytes)
    block[:] = transport.rank
    transport.barrier()
    return set(block.tolist())


def test_memory_of_one_rank_is_never_another_ranks():
    ranks = Ranks(LocalTransport(3, 1, timeout=30))
    kept = ranks.transport.store.empty((1 << 21,), "uint8")
    kept[:] = 77
    assert ranks.values(fill_span, 3 << 20) == [{rank} for rank in range(3)]
    assert set(kept.tolist()) == {77}
    ranks.close()


# A payload may be the same object as the last one, an equal object, or another one of equal length.
PAYLOADS = [b"", b"some", bytes(bytearray(b"some")), b"more", b"long" * 8, b"long" * 9]


@examples(200)
@given(payloads=st.lists(st.sampled_from(range(len(PAYLOADS)))), clears=st.booleans())
def test_a_box_contains_what_was_put_in_it_last(payloads, clears):
    box = Mailbox(SharedMemory(1), 16)
    for payload in payloads:
        box.put(PAYLOADS[payload])
        assert box.get() == PAYLOADS[payload]
        if clears:
            box.long = None
