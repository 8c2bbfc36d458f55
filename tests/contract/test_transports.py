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
from hypothesis import given
from hypothesis import strategies as st
from oracle import examples

from synkhronos._errors import SynkhronosError, WorldBrokenError
from synkhronos.host.machine import cores
from synkhronos.host.status import StatusPage
from synkhronos.stores.memory import SharedMemory
from synkhronos.transports import local
from synkhronos.transports.local import LocalTransport
from synkhronos.transports.mailbox import Mailbox
from synkhronos.transports.milestones import Milestones
from specifications.transport import NaiveTransport
from synkhronos.transports.tree import RADIX, TreeTransport
from synkhronos.transports.waiting import LONGEST, Patience

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


def wait_for_a_late_rank(transport, late):
    """Let one rank be late; return its process, and the processes whose cores this rank has left."""
    if transport.rank == late:
        time.sleep(2 * LONGEST)
    return os.getpid(), left.copy()


left = []


@pytest.mark.skipif(cores() < 2, reason="with one core, all ranks share it")
def test_who_was_woken_leaves_the_core_of_the_rank_that_it_waited_for(monkeypatch):
    monkeypatch.setattr(local, "leave_core_of", left.append)
    ranks = Ranks(LocalTransport(2, 0, timeout=30))
    left.clear()
    try:
        (master, _), (worker, own) = ranks.values(wait_for_a_late_rank, 1)
        assert left == [worker] and set(own) <= {master}
        time.sleep(2 * LONGEST)
        (_, own) = ranks.values(wait_for_a_late_rank, 0)[1]
        assert left == [worker] and own and set(own) == {master}
    finally:
        ranks.close()


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


def test_workers_inherit_the_state_of_a_process_and_nothing_was_posted_before_the_first_command():
    assert [make.inherits for make in TRANSPORTS] == [False, True]
    assert not any(make(2, 0).posted for make in TRANSPORTS)


def fill(transport, value):
    transport.store.memory.allocate(5000)[...] = value


def test_an_attendant_has_memory_of_its_own():
    ranks = Ranks(LocalTransport(3, 0, timeout=30))
    store = ranks.transport.store
    words = store.commons.array("words", (3,), "int64")

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

    attendant = ranks.transport.attend("filler", serve)
    wait_for(0)
    ranks.values(fill, 5)
    words[1] = 1
    wait_for(2)
    attendant.end(5)
    ranks.close()
    assert words.tolist() == [1, 1, 9]


class LateSignal:
    def try_wait(self):
        return True  # not yet

    def wait(self, seconds):
        time.sleep(0.05)
        return True


class Learned(Patience):
    """Does not poll."""

    def poll(self, try_wait, began, worked, when_idle):
        return False

    def learn(self, worked, waited, has_cores):
        self.worked, self.waited = worked, waited


def test_a_patience_learns_how_long_a_wait_was():
    transport, patience = LocalTransport(2, 0), Learned()
    patience.resumed = time.monotonic() - 1
    began = time.monotonic()
    waited = transport._wait(LateSignal(), patience)
    elapsed = time.monotonic() - began
    assert 0.05 <= patience.waited <= elapsed and 1 <= patience.worked <= 1 + elapsed
    assert 0.05 <= waited <= elapsed  # of the time limit of a barrier


def test_the_work_before_a_wait_for_a_command_is_the_whole_last_command():
    transport, inside = LocalTransport(2, 0), Learned()
    between = Learned(inside)
    between.resumed = inside.resumed = time.monotonic() - 1
    transport._wait(LateSignal(), inside)
    assert inside.worked >= 1
    transport._wait(LateSignal(), between)
    assert between.worked >= 1
    transport._wait(LateSignal(), inside)
    assert inside.worked < 1  # since the command has begun


# Time-outs and deaths


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


def sleep(transport):
    time.sleep(1.5 if transport.rank == 1 else 0)


@pytest.mark.parametrize("make", TRANSPORTS, ids=lambda make: make.__name__)
def test_a_barrier_that_lasts_too_long_breaks_the_world(make):
    ranks = Ranks(make(2, 0, timeout=0.3))
    began = time.monotonic()
    with pytest.raises(WorldBrokenError, match="timeout=0.3.* for rank 1"):
        ranks.run(sleep)
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
    prepared = ranks.transport.store.commons.array("prepared", (4,), "int64")

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
    transport, finish, died = LocalTransport(3, 0), Milestones.finish, []

    def finish_and_die(milestones, rank, passed):
        finish(milestones, rank, passed)
        if rank == 2 and transport.in_program:
            os.kill(os.getpid(), 9)

    def replace(dead):
        died.extend(dead)
        for rank in dead:
            transport.replace(rank, lambda takes_part: os._exit(1) if takes_part else None)

    monkeypatch.setattr(Milestones, "finish", finish_and_die)
    handlers.append(replace)
    ranks = Ranks(transport)
    assert ranks.values(end_early) == [0, 1, 2]
    assert died == [1, 2]
    assert ranks.values(exchange_ranks) == [[0, 1, 2]] * 3
    ranks.close()


def test_milestones_of_an_earlier_command_do_not_count():
    milestones = Milestones(StatusPage(3))
    late = functools.partial(milestones.describe_late, {0}, "abc")
    milestones.begin()
    assert late() == "rank b (running, computing), rank c (running, computing)"
    milestones.reach(1, 1)
    milestones.reach(1, 2)
    assert late() == "rank c (running, computing)"
    milestones.finish(2, 1)
    assert milestones.has_finished(2) and not milestones.has_finished(1)
    assert milestones.missing(1) == [2] and milestones.missing(0) == []
    assert late() == "rank b (running, after barrier 2 of the command)"
    milestones.begin()
    assert not any(map(milestones.has_finished, range(3))) and milestones.missing(9) == []
    assert late() == "rank b (running, computing), rank c (running, computing)"
    for rank in range(3):
        milestones.finish(rank, 0)
    milestones.forget(1)
    assert [milestones.has_finished(rank) for rank in range(3)] == [True, False, True]
    assert milestones.missing(0) == [0, 2]


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


# Processes


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


def has_cores(transport):
    return bool(transport._has_cores[0])


def test_ranks_poll_only_while_there_is_a_core_for_each(monkeypatch):
    from synkhronos.transports import local

    monkeypatch.setattr(local, "cores", lambda: 2)
    for size, may_poll, expected in ((2, None, True), (3, None, False), (2, False, False)):
        ranks = Ranks(LocalTransport(size, 0, timeout=30, may_poll=may_poll))
        assert ranks.values(has_cores) == [expected] * size
        ranks.close()
    monkeypatch.setattr(local, "affinity", lambda processes: 1)  # the count while commands run
    ranks = Ranks(LocalTransport(2, 0, timeout=30))
    ranks.values(number)
    assert ranks.values(has_cores) == [False, False]
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
            box.clear()


def test_an_object_that_is_in_a_box_is_not_written_again():
    memory = SharedMemory(1)
    box = Mailbox(memory, 16)
    box.put(PAYLOADS[1])
    start = memory.mapping.find(PAYLOADS[1])
    memory.mapping[start : start + 1] = b"S"
    box.put(PAYLOADS[1])
    assert box.get() == b"Some"
    box.put(PAYLOADS[2])  # equal, but another object
    assert box.get() == b"some"


def test_what_fits_in_a_box_takes_no_other_memory():
    memory = SharedMemory(1)
    box = Mailbox(memory, 48)  # with its header, it fills a block
    neighbour = memory.allocate(64)
    neighbour[:] = 7
    free = memory._small.holes()
    for payload in (b"x" * 48, b"", b"y" * 47):
        box.put(payload)
        assert box.get() == payload
    assert memory._small.holes() == free and set(neighbour.tolist()) == {7}


def test_the_memory_of_a_box_for_long_contents_is_free_once_they_were_read():
    memory = SharedMemory(1)
    box = Mailbox(memory, 48)
    free = memory._small.holes()
    long = b"z" * 49
    for _ in range(2):
        box.put(long)
        assert memory._small.holes() != free and box.get() == long
        box.clear()
        memory.collect()
        assert memory._small.holes() == free
        memory.allocate(64)[:] = 1  # overwrites the former contents
        memory.collect()


def test_a_box_keeps_its_contents_if_there_is_no_room_for_more(monkeypatch):
    memory = SharedMemory(1)
    box = Mailbox(memory, 16)
    box.put(PAYLOADS[1])

    def refuse(nbytes):
        raise MemoryError

    monkeypatch.setattr(memory, "allocate", refuse)
    with pytest.raises(MemoryError):
        box.put(PAYLOADS[4])
    assert box.get() == PAYLOADS[1]
    box.put(PAYLOADS[1])
    assert box.get() == PAYLOADS[1]
