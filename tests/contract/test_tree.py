"""Tests of ranks that start each other along a tree: deaths at each place, late ranks, and counts."""

import functools
import os
import pickle
import signal
import time

import pytest
from checks.ranks import Outcome, Ranks

from synkhronos._errors import WorldBrokenError
from synkhronos.transports.local import LocalTransport
from synkhronos.transports.tree import MOST_WITHOUT, RADIX, TreeTransport, make_local

SIZE, MASTER = 8, 2
# With a radix of 2, the master starts 6, 4 and 3; 6 starts 0 and 7, 0 starts 1, and 4 starts 5.
binary = functools.partial(TreeTransport, SIZE, MASTER, radix=2)
COMMAND = 2  # the number of the command in which ranks die or are late

handlers = []  # of the deaths of workers, in the process of the master


def number(transport):
    return transport.rank


def at_start(transport, rank, after, do):
    """Let a rank, in one command, do something after it has started some of the workers below it."""
    posts = transport._post_below

    def reach(at):
        if transport.rank == rank and transport._progress.command[0] == COMMAND and at == after:
            do()

    def set_place():
        TreeTransport._set_place(transport)
        below = transport._post_below
        transport._post_below = [
            post for at, one in enumerate(below) for post in (functools.partial(reach, at), one)
        ] + [functools.partial(reach, len(below))]

    transport._set_place = set_place
    assert posts is transport._post_below  # the master's, which is not late


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def test_few_ranks_have_no_tree_and_a_successor_has_what_its_size_needs():
    assert type(make_local(MOST_WITHOUT)) is LocalTransport
    many = make_local(MOST_WITHOUT + 1, 3, timeout=30, may_poll=False, labels=range(100, 110))
    assert type(many) is TreeTransport and many._radix == RADIX
    assert (many.master_rank, many.timeout, many.labels[1]) == (3, 30, 101)
    few = many.successor(2, 1)
    assert type(few) is LocalTransport and few.store is many.store
    assert type(few.successor(10, 0)) is TreeTransport


DEATHS = [(6, 0), (6, 1), (6, 2), (0, 0), (3, 0)]


@pytest.mark.parametrize("rank, after", DEATHS)
def test_a_death_before_a_worker_has_started_others_breaks_the_world(rank, after):
    transport = binary()
    at_start(transport, rank, after, die)
    ranks = Ranks(transport)
    assert ranks.values(number) == [*range(SIZE)]
    began = time.monotonic()
    with pytest.raises(WorldBrokenError, match=rf"died: rank {rank} \(killed by SIGKILL\); the others"):
        ranks.run(number)
    assert time.monotonic() - began < 5 and not transport._children.workers
    transport.close(0)


def count_runs(transport):
    """Count the runs of each rank, in a program in which deaths are handled."""
    transport.begin_program(handlers[-1] if transport.is_master_process() else None)
    transport.store.named_memory.array("runs", (SIZE,), "int64")[transport.rank] += 1
    return transport.rank


@pytest.mark.parametrize("rank, after", DEATHS)
def test_the_successor_of_a_dead_worker_starts_the_others_and_none_runs_twice(rank, after):
    transport = binary()
    runs = transport.store.named_memory.array("runs", (SIZE,), "int64")
    first = transport.store.named_memory.array("first", (1,), "int64")

    def die_once():
        first[0] += 1
        if first[0] == 1:
            die()

    def replace(dead):
        assert [*dead] == [rank]
        transport.replace(rank, lambda takes_part: None if takes_part else os._exit(1))

    handlers.append(replace)
    at_start(transport, rank, after, die_once)
    ranks = Ranks(transport)
    for turn in range(1, 5):
        assert ranks.values(count_runs) == [*range(SIZE)]
        assert runs.tolist() == [turn] * SIZE
    assert first[0] == 2  # once more by the successor
    ranks.close()


@pytest.mark.parametrize("rank, after", [(6, 0), (0, 1), (5, 0)])
def test_the_others_are_started_if_the_master_answers_for_a_dead_worker(rank, after):
    transport = binary()
    runs = transport.store.named_memory.array("runs", (SIZE,), "int64")
    handlers.append(lambda dead: transport.answer_for(*dead, pickle.dumps(Outcome("dead"))))
    at_start(transport, rank, after, die)
    ranks = Ranks(transport)
    assert ranks.values(count_runs) == [*range(SIZE)]
    expected = [*range(SIZE)]
    expected[rank] = "dead"
    assert ranks.values(count_runs) == expected
    assert runs.tolist() == [1 if one == rank else 2 for one in range(SIZE)]
    transport.kill()


@pytest.mark.parametrize(
    "when, answers, last",
    [("finished", False, 1), ("finished", True, 5), ("counted", False, 5), ("counted", True, 1)],
)
def test_a_reply_counts_if_the_worker_dies_before_it_has_posted(when, answers, last):
    transport, died = binary(), []

    def handle(dead):
        died.extend(dead)
        if answers:
            transport.answer_for(1, b"")
        else:
            transport.replace(1, lambda takes_part: os._exit(1) if takes_part else None)

    def dying(function):
        def call():
            if transport.rank == 1 and transport._progress.command[0] == COMMAND:
                die()
            return function()

        return call

    class Replied:
        reset = transport._replied.reset
        post = transport._replied.post
        read = transport._replied.read

    name = "post" if when == "finished" else "read"
    setattr(Replied, name, staticmethod(dying(getattr(Replied, name))))
    transport._replied = Replied
    handlers.append(handle)
    ranks = Ranks(transport)
    assert ranks.values(number) == [*range(SIZE)]
    assert ranks.values(sleep_in_program, last) == [*range(SIZE)]
    assert died == [1]
    if not answers:
        assert ranks.values(number) == [*range(SIZE)]
    transport.kill()


def sleep_in_program(transport, last):
    transport.begin_program(handlers[-1] if transport.is_master_process() else None)
    return sleep_on(transport, last, 0.1 if last == 1 else 0.7)


def test_the_ranks_below_one_that_has_not_begun_are_not_named_as_late():
    transport = binary(timeout=30)
    at_start(transport, 6, 0, functools.partial(time.sleep, 20))
    ranks = Ranks(transport)
    ranks.run(number)
    transport.timeout = 1
    with pytest.raises(
        WorldBrokenError, match=r"timeout=1\) seconds, for rank 6 \(running, comp"
    ) as one:
        ranks.run(number)
    assert str(one.value).count("running") == 1
    transport.close(0)


def test_a_stopped_rank_is_named_and_the_ranks_below_it_are_ended():
    transport = binary(timeout=30)
    at_start(transport, 6, 1, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    ranks = Ranks(transport)
    ranks.run(number)
    transport.timeout = 0.5
    with pytest.raises(WorldBrokenError, match=r"seconds, for rank 6 \(stopped, as by SIGSTOP\); every"):
        ranks.run(number)
    assert not transport._children.workers
    transport.close(0)


def test_the_ranks_below_a_stopped_one_end_by_themselves_when_the_world_is_closed():
    transport = binary()
    ended = transport.store.named_memory.array("ended", (SIZE,), "int64")
    pids = transport.store.named_memory.array("pids", (SIZE,), "int64")

    class Marking(Ranks):
        def serve(self, transport):
            pids[transport.rank] = os.getpid()
            super().serve(transport)
            ended[transport.rank] = 1

    ranks = Marking(transport)
    ranks.values(number)
    os.kill(pids[6], signal.SIGSTOP)
    transport.post(b"")
    limit = time.monotonic() + 20
    while ended.sum() < SIZE - 2 and time.monotonic() < limit:
        time.sleep(0.01)
    transport.close(0)
    assert ended.tolist() == [1, 1, 0, 1, 1, 1, 0, 1]


def interrupt_often(transport):
    """Let a timer's signals interrupt each later wait of a worker."""
    if not transport.is_master_process():
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)


def test_workers_whose_waits_are_interrupted_take_each_command_once():
    transport = binary(timeout=30)
    runs = transport.store.named_memory.array("runs", (SIZE,), "int64")
    handlers.append(None)
    ranks = Ranks(transport)
    ranks.values(interrupt_often)
    for turn in range(1, 30):
        time.sleep(0.002)
        assert ranks.values(count_runs) == [*range(SIZE)]
        assert runs.tolist() == [turn] * SIZE
    ranks.close()


def sleep_on(transport, rank, seconds):
    time.sleep(seconds if transport.rank == rank else 0)
    return transport.rank


def test_posts_that_come_too_often_change_nothing():
    transport = binary(timeout=30)
    runs = transport.store.named_memory.array("runs", (SIZE,), "int64")
    handlers.append(None)
    ranks = Ranks(transport)
    for turn in range(1, 20):
        for rank in range(SIZE):
            if rank != MASTER and turn % 2:
                transport._starts[rank].post()  # before the command: there is no new one
        transport._all_replied.post()
        payload = pickle.dumps((count_runs, ()))
        transport.post(payload)
        transport._all_replied.post()  # before all have replied
        transport._replied.post()  # so another rank than the last finds that all have replied
        for rank in range(SIZE):
            if rank != MASTER:
                transport._starts[rank].post()  # another time
        count_runs(transport)
        replies = transport.collect()
        values = [None if one is None else pickle.loads(one).value for one in replies]
        assert values == [None if rank == MASTER else rank for rank in range(SIZE)]
        assert runs.tolist() == [turn] * SIZE
    ranks.close()
