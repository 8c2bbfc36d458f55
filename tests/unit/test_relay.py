"""Tests of what belongs to no rank, for ranks on several machines: in threads, with naive links."""

import time

import numpy as np
import pytest
from checks.machines import ThreadedMachines, start_world
from test_engines import NaiveLab

import synkhronos as synk
from synkhronos._errors import SynkhronosError
from specifications.engine import Shared

SIZES = [[1, 2], [2, 1, 2]]


@pytest.fixture(params=SIZES, ids=str)
def lab(request):
    """Factory of variables, in a world over machines with these numbers of ranks."""
    yield from open_lab(ThreadedMachines(request.param, timeout=20))


@pytest.fixture
def without_progress_processes():
    yield from open_lab(ThreadedMachines([1, 1], timeout=20, have_progress_processes=False))


def open_lab(transport):
    made = NaiveLab()
    if synk.is_forked():
        synk.close()
    start_world(transport, made.engine)
    yield made
    synk.close()


def shared_by_all(lab, *values):
    """Return variables that all ranks have."""
    made = [lab.shared(np.array(value), f"w{number}") for number, value in enumerate(values)]
    synk.function([], [(one.sum(), "sum") for one in made])
    synk.distribute()
    return made


def set_value(shared, value):
    shared.storage = value


def test_clocks_of_other_machines_are_seen_and_waited_for(lab):
    def program(rank):
        for step in range(1, 30):
            rank.clock = step
            rank.wait_for_clocks(step - 2)
            assert max(rank.clocks) - min(rank.clocks) <= 4
        return rank.clocks[rank.rank]

    assert synk.spmd(program) == [29] * synk.size()


def test_messages_arrive_complete_and_in_order(lab):
    def program(rank):
        large = np.arange(300_000.0) + rank.rank
        found, unsent = {}, [(to, number) for number in range(4) for to in range(rank.size)]
        while unsent or sum(map(len, found.values())) < 4 * rank.size:
            if unsent:
                to, number = unsent[0]
                if rank.send(to, [large[number:], np.array(number)], tag=number % 2):
                    del unsent[0]
            for tag in (0, 1):
                message = rank.receive(tag)
                if message is not None:
                    source, (array, number) = message
                    assert np.array_equal(array, np.arange(300_000.0)[number:] + source)
                    found.setdefault((source, tag), []).append(int(number))
        return found

    size = synk.size()
    expected = {(source, tag): [tag, tag + 2] for source in range(size) for tag in (0, 1)}
    assert synk.spmd(program) == [expected] * size


def test_what_was_sent_before_a_barrier_can_be_received_after_it(lab):
    def program(rank):
        for _ in range(5):
            for to in range(rank.size):
                rank.send(to, np.full(200_000, rank.rank))
            rank.barrier()
            found = []
            while (message := rank.receive()) is not None:
                found.append(message[0])
            assert sorted(found) == list(range(rank.size))
            rank.barrier()

    synk.spmd(program)


def test_a_full_box_on_another_machine_refuses(lab):
    def program(rank):
        if rank.rank == rank.size - 1:
            while min(rank.clocks[:-1]) == 0:
                time.sleep(1e-3)
            found = []
            while (message := rank.receive(wait=True)) is not None:
                found.append(int(message[1]))
                if len(found) == 1:
                    rank.clock = 1
                if len(found) == rank.clocks[0]:
                    return found
        if rank.rank == 0:
            sent = 0
            while rank.send(rank.size - 1, np.array(sent)):
                sent += 1
                time.sleep(5e-3)
            rank.clock = sent
            return sent
        rank.clock = 1
        return None

    results = synk.spmd(program)
    assert results[0] < 50 and results[-1] == list(range(results[0]))


def test_a_rank_that_waits_gets_what_was_sent_before_the_others_ended(lab):
    def program(rank):
        last = rank.size - 1
        if rank.rank < last:
            return rank.send(last, np.full(400_000, rank.rank))
        found = []
        with pytest.raises(SynkhronosError, match="all other ranks have ended"):
            while True:
                found.append(int(rank.receive(wait=True)[1][-1]))
        return sorted(found)

    results = synk.spmd(program)
    assert results[-1] == list(range(synk.size() - 1)) and all(results[:-1])


def test_a_rank_does_not_wait_for_messages_that_a_full_box_keeps_out(lab):
    def program(rank):
        if rank.rank < rank.size - 1:
            while rank.send(rank.size - 1, np.array(0), tag=3):
                pass
        else:
            rank.receive(tag=5, wait=True)

    with pytest.raises(synk.WorkerError, match="all other ranks have ended"):
        synk.spmd(program)


def test_every_rank_asks_the_controller(lab):
    asked = []

    def controller(request, rank, info):
        asked.append(rank)
        if request == "fail":
            raise LookupError("no such answer")
        return request + info.sum()

    def program(rank):
        with pytest.raises(SynkhronosError, match="no such answer"):
            rank.ask("fail")
        return [float(rank.ask(number, np.full(3, rank.rank))) for number in range(5)]

    size = synk.size()
    expected = [[number + 3.0 * rank for number in range(5)] for rank in range(size)]
    assert synk.spmd(program, controller=controller) == expected
    assert sorted(asked) == sorted([*range(size)] * 6)


def test_what_ranks_of_all_machines_push_adds_up(lab):
    w, v = shared_by_all(lab, np.zeros((3, 400_000)), np.arange(5))

    def program(rank, w, v):
        center = rank.center([w, v])
        for _ in range(4):
            for variable in (w, v):
                values = variable.storage
                set_value(variable, values + rank.rank + 1)
            center.push()
        while sum(rank.clocks) < rank.size:
            rank.clock = 1
            time.sleep(1e-3)
        center.pull()
        assert np.array_equal(w.storage, center.value()[0])
        return [one.tolist() for one in (w.storage[1, -2:], v.storage)]

    size = synk.size()
    total = 4 * size * (size + 1) // 2
    expected = [[total] * 2, [total + k for k in range(5)]]
    assert synk.spmd(program, w, v) == [expected] * size


def test_updates_of_all_machines_do_not_interrupt_each_other(lab):
    [w] = shared_by_all(lab, np.zeros(400_000))

    def program(rank, w):
        center = rank.center(w)

        def add(there, own):
            assert there[0] == there[-1], "another rank is in the middle of an update"
            there[:3] += rank.rank + 1
            there[3:] += own[0] + 1

        set_value(w, np.full(400_000, float(rank.rank)))
        for _ in range(4):
            center.update(add)
        with pytest.raises(KeyError, match="of the function"):
            center.update(lambda there, own: {}["of the function"])
        while sum(rank.clocks) < rank.size:
            rank.clock = 1
            time.sleep(1e-3)
        return set(center.value())

    size = synk.size()
    assert synk.spmd(program, w) == [{4 * size * (size + 1) / 2}] * size


def test_a_lock_is_one_for_all_machines(lab, tmp_path):
    path = tmp_path / "count"
    path.write_text("0")

    def program(rank):
        lock = rank.lock()
        for _ in range(5):
            with lock:
                before = int(path.read_text())
                time.sleep(1e-4)
                path.write_text(str(before + 1))

    synk.spmd(program)
    assert path.read_text() == str(5 * synk.size())


def test_variables_of_a_program_are_adopted_on_all_machines(lab):
    [w] = shared_by_all(lab, np.zeros(2))

    def program(rank, w):
        own = Shared(np.full(3, float(rank.rank)), "own")
        rank.adopt(own)
        rank.all_reduce([own, w], "sum")
        center = rank.center(own)
        while sum(rank.clocks) < rank.size:
            rank.clock = 1
            time.sleep(1e-3)
        center.push(reset=True)
        return set(center.value()), set(own.storage), float(rank.all_reduce(float(rank.rank), "max"))

    size = synk.size()
    total = size * (size - 1) / 2
    assert synk.spmd(program, w) == [({total}, {0}, size - 1.0)] * size


def test_groups_have_the_ranks_of_one_machine(lab):
    machines = synk.world.world.current_world().transport._ranges

    def program(rank, machines):
        own = next(number for number, ranks in enumerate(machines) if rank.rank in ranks)
        group = rank.split(own)
        total = float(group.all_reduce(rank.rank, "sum"))
        try:
            rank.split(0)
        except ValueError as error:
            assert "expected ranks of one machine" in str(error) and "colors by machine" in str(error)
            return total, list(group.ranks)

    by_rank = {rank: ranks for ranks in machines for rank in ranks}
    expected = [(float(sum(by_rank[rank])), list(by_rank[rank])) for rank in range(synk.size())]
    assert synk.spmd(program, [list(ranks) for ranks in machines]) == expected


def test_elastic_moves_of_all_machines_conserve_the_sum(lab):
    [w] = shared_by_all(lab, np.zeros(300_000))

    def program(rank, w):
        center = rank.center(w)
        set_value(w, np.full(300_000, float(rank.rank)))
        for _ in range(6):
            center.elastic(0.5)
        rank.clock = 1
        while sum(rank.clocks) < rank.size:
            time.sleep(1e-3)
        return w.storage, center.value()

    results = synk.spmd(program, w)
    total = sum(own for own, _ in results) + results[0][1]
    np.testing.assert_allclose(total, sum(range(synk.size())))
    assert all(np.array_equal(value, results[0][1]) for _, value in results)


def test_the_first_rank_gives_a_center_its_values_wherever_it_is(lab):
    [w] = shared_by_all(lab, np.zeros(2))

    def program(rank, w):
        set_value(w, np.full(2, float(rank.rank)))
        if rank.rank < rank.size - 1:
            while not rank.clocks[-1]:
                time.sleep(1e-3)
        center = rank.center(w, "mine")
        rank.clock = 1
        center.assign(np.full(2, 7.0)) if rank.rank == rank.size - 1 else None
        return w.storage.tolist()

    last = float(synk.size() - 1)
    results = synk.spmd(program, w)
    assert results[-1] == [last] * 2
    assert all(one in ([last] * 2, [7.0] * 2) for one in results)


def test_another_shape_is_refused_in_words_on_every_machine(lab):
    [w] = shared_by_all(lab, np.zeros(2))

    def program(rank, w):
        if rank.rank:
            while not rank.clocks[0]:
                time.sleep(1e-3)
            set_value(w, np.zeros(3))
            with pytest.raises(ValueError, match="has the shape .3,. .* and the center has .2,."):
                rank.center(w)
        else:
            rank.center(w)
            rank.clock = 1

    synk.spmd(program, w)


def test_an_error_on_one_machine_ends_waits_on_the_others(lab):
    [w] = shared_by_all(lab, np.zeros(2))

    def program(rank, w):
        rank.center(w)
        if rank.rank == 1:
            raise LookupError("lost")
        rank.receive(wait=True)

    with pytest.raises(synk.WorkerError, match="lost"):
        synk.spmd(program, w)
    assert synk.spmd(lambda rank: rank.clocks) == [[0] * synk.size()] * synk.size()


def test_without_couriers_it_is_refused_in_words(without_progress_processes):
    [w] = shared_by_all(without_progress_processes, np.zeros(2))

    def program(rank, w):
        for use in (lambda: rank.center(w), lambda: rank.send(0, 1), lambda: rank.wait_for_clocks(0)):
            with pytest.raises(SynkhronosError, match="a second task on each machine"):
                use()

    synk.spmd(program, w)
    with pytest.raises(SynkhronosError, match="a second task on each machine"):
        synk.spmd(program, w, controller=lambda *_: None)
