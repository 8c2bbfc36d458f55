"""Tests of the controller of a program, and of the registers for its questions and answers."""

import os
import signal
import sys
import threading
import time

import numpy as np
import psutil
import pytest

import synkhronos as synk
from synkhronos._errors import SynkhronosError
from synkhronos.services.controller import Controller
from synkhronos.world.world import current_world

RANKS = 3


@pytest.fixture(scope="module")
def world(open_world):
    open_world(RANKS, timeout=30)
    synk.distribute()


class Counter:
    def __init__(self):
        self.calls = []

    def __call__(self, request, rank, info):
        self.calls.append(rank)
        if request == "fail":
            raise LookupError(f"rank {rank} asks too much")
        if request == "order":
            return list(self.calls)
        return request, rank, info


def test_a_controller_answers_every_question_of_every_rank(world):
    counter = Counter()

    def program(rank):
        own = [rank.ask(("request", n), {"info": np.arange(3)}) for n in range(20)]
        assert [one[:2] for one in own] == [(("request", n), rank.rank) for n in range(20)]
        assert own[0][2]["info"].tolist() == [0, 1, 2]
        with pytest.raises(SynkhronosError, match=f"LookupError: rank {rank.rank} asks too much"):
            rank.ask("fail")
        rank.barrier()
        return rank.ask("order")

    for calls in synk.spmd(program, controller=counter):
        assert sorted(calls[: 21 * RANKS]) == sorted(list(range(RANKS)) * 21)
    assert counter.calls == []  # it works in a process of its own


def test_questions_are_answered_in_the_order_of_their_arrival(world):
    calls = []

    def answer(request, rank, info):
        calls.append(rank)
        time.sleep(request)
        return list(calls)

    def program(rank):
        rank.barrier()
        time.sleep([0.4, 0, 0.2][rank.rank])
        return rank.ask(0.8 if rank.rank == 1 else 0)  # the others wait while this is answered

    assert synk.spmd(program, controller=answer) == [[1, 2, 0], [1], [1, 2]]


def test_questions_and_answers_have_any_size(world):
    def program(rank):
        asked = [np.full(size, rank.rank) for size in (1 << 20, 3, 0, 300_000, 128)]
        return all(np.array_equal(rank.ask(one), -one) for one in asked)

    assert all(synk.spmd(program, controller=lambda request, rank, info: -request))


def test_what_the_script_has_defined_since_it_forked_can_be_asked_and_answered(world, monkeypatch):
    main = sys.modules["__main__"]
    later = type("Later", (), {"__module__": "__main__", "value": 3})
    monkeypatch.setattr(main, "Later", later, raising=False)

    def program(rank):
        own = type("Own", (), {"__module__": "__main__", "value": 4})
        main.Own = own  # the controller does not have it
        try:
            return rank.ask(own()).value, rank.ask(lambda: 5)()
        finally:
            del main.Own

    def answer(request, rank, info):
        return later() if not callable(request) and request.value == 4 else request

    assert synk.spmd(program, controller=answer) == [(3, 5)] * RANKS


class Unreadable:
    def __reduce__(self):
        return int, ("unreadable",)


def test_what_cannot_be_pickled_is_refused_in_words_and_the_controller_goes_on(world):
    def program(rank):
        with pytest.raises(TypeError, match="rank.ask: the request or the info cannot be pickled"):
            rank.ask(threading.Lock())
        with pytest.raises(SynkhronosError, match="(?s)the controller raised.*'unreadable'"):
            rank.ask(Unreadable())
        with pytest.raises(SynkhronosError, match="(?s)the controller raised.*cannot pickle"):
            rank.ask("lock")
        return rank.ask("hello")

    def answer(request, rank, info):
        return threading.Lock() if request == "lock" else request

    assert synk.spmd(program, controller=answer) == ["hello"] * RANKS


def test_ranks_learn_that_the_controller_has_died(world):
    def answer(request, rank, info):
        os.kill(os.getpid(), signal.SIGKILL)

    def program(rank):
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(SynkhronosError, match="the controller has died"):
                rank.ask("die")
        return time.monotonic() - began

    assert max(synk.spmd(program, controller=answer)) < 2
    assert all(synk.spmd(lambda rank: rank.ask(rank.rank), controller=Counter()))


def test_a_controller_that_ends_at_once_is_an_error_before_the_program(world, monkeypatch):
    monkeypatch.setattr("synkhronos.services.controller._serve", lambda *_: os._exit(3))
    with pytest.raises(SynkhronosError, match="controller has ended before the program"):
        synk.spmd(lambda rank: rank.ask("hello"), controller=Counter())
    assert synk.spmd(lambda rank: rank.rank) == [0, 1, 2]


def test_a_fresh_rank_gets_no_answer_to_a_question_of_the_dead_one(two):
    def answer(request, rank, info):
        if request == "old":
            os.kill(info, signal.SIGKILL)
        return request

    def program(rank):
        if rank.rank == 1:
            return rank.ask("new" if rank.restarts else "old", os.getpid())

    assert synk.spmd(program, controller=answer, on_death="continue") == [None, "new"]


def test_a_second_ctrl_c_at_the_start_leaves_no_controller(two, monkeypatch):
    """It would use the named memory while the master clears them."""
    synk.distribute()
    transport, start = current_world().transport, Controller.start
    attend = transport.attend

    def interrupted_start(controller):
        os.kill(os.getpid(), signal.SIGINT)
        start(controller)

    def interrupted_attend(*arguments):
        service_process = attend(*arguments)
        os.kill(os.getpid(), signal.SIGINT)
        return service_process

    monkeypatch.setattr(Controller, "start", interrupted_start)
    monkeypatch.setattr(transport, "attend", interrupted_attend)
    before = len(psutil.Process().children())
    # It is ignored if the tests run in the background of a shell.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            synk.spmd(lambda rank: None, controller=lambda *question: question)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(psutil.Process().children()) == before
    monkeypatch.undo()
    assert synk.spmd(lambda rank: rank.rank) == [0, 1]
