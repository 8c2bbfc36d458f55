"""Tests of the same operations in worlds with each combination of a transport and an engine.

With the naive transport, ranks share no memory and inherit nothing. The naive engine does not use a
compiler. So these tests depend only on the interfaces.
"""

import gc
import itertools

import numpy as np
import pytest
from checks.machines import ThreadedMachines, start_world
from test_engines import NaiveLab, CompilerLab

import synkhronos as synk
from synkhronos.transports.local import LocalTransport
from specifications.transport import NaiveTransport
from synkhronos.world.rank_state import Command, sent_form
from synkhronos.world.schedule import Schedule, ScheduledRun
from synkhronos.world.world import current_world, world_exists

RANKS, MASTER = 3, 1


def several_machines(size, master_rank, timeout):
    return ThreadedMachines([2, 1], master_rank, timeout)


TRANSPORTS, LABS = [NaiveTransport, LocalTransport, several_machines], [NaiveLab, CompilerLab]
PARTS = [(transport, lab) for transport in TRANSPORTS for lab in LABS]
PARTS[-1] = pytest.param(PARTS[-1], marks=pytest.mark.slow)  # each machine compiles, in one process


@pytest.fixture(params=PARTS, ids=lambda parts: f"{parts[0].__name__}-{parts[1].__name__}")
def lab(request):
    """Factory of variables, in a world with a transport and an engine."""
    make_transport, make_lab = request.param
    made = make_lab()
    if world_exists():
        synk.close()
    start_world(make_transport(RANKS, MASTER, timeout=60), made.engine)
    yield made
    if world_exists():
        synk.close()


@pytest.fixture
def rows():
    return np.arange(20.0).reshape(10, 2)


class Fail(Command):
    """Raises an exception on some ranks. The others wait for them at a barrier."""

    def __init__(self, ranks):
        self.ranks = ranks

    def run(self, state):
        if state.rank in self.ranks:
            raise LookupError(f"lost on rank {state.rank}")
        state.transport.barrier()


def replicas(shared):
    return [synk.get_value(rank, shared).tolist() for rank in range(RANKS)]


def test_calls_have_the_outputs_of_the_whole_data(lab, rows):
    x, scale = lab.tensor("x", 2), lab.tensor("scale", 0)
    f = synk.function(
        [x], [(x * scale).mean(), (x.sum(axis=0), "sum"), (x * scale, "gather"), (x + x).mean(axis=0)],
        bcast_inputs=[scale],
    )  # fmt: skip
    for batch in (None, 7, slice(1, None, 3), [9, 0, 0, 4], 2, [5]):
        for num_slices in (1, 2, 5):
            chosen = rows if batch is None else rows[:batch] if isinstance(batch, int) else rows[batch]
            for given in (rows, synk.data(rows), synk.data(rows)):
                mean, total, same, double = f(given, 2, batch=batch, num_slices=num_slices)
                np.testing.assert_allclose(mean, 2 * chosen.mean())
                np.testing.assert_allclose(total, chosen.sum(axis=0))
                np.testing.assert_array_equal(same, 2 * chosen)
                np.testing.assert_allclose(double, 2 * chosen.mean(axis=0))
    assert f(rows, 2, output_subset=[1])[0].tolist() == rows.sum(axis=0).tolist()


def test_data_are_read_as_they_are_at_the_call(lab, rows):
    x = lab.tensor("x", 2)
    f = synk.function([x], (x * 1.0, "gather"))
    data = synk.data(rows)
    for value in (1, 2):
        data[:] = value
        assert (f(data) == value).all() and (f(data, batch=[3, 1]) == value).all()
    data.set_length(13)
    assert f(data).tolist() == [[2, 2]] * 10 + [[0, 0]] * 3
    y = lab.tensor("y", 2)
    both = synk.function([x, y], (x + y, "gather"))
    excerpt = synk.data(rows[:4], minibatch=True)
    assert both(data, excerpt, batch=slice(6, 10)).tolist() == (rows[:4] + 2).tolist()


def test_large_outputs_and_inputs_arrive(lab):
    x = lab.tensor("x", 2)
    f = synk.function([x], [(x + x, "gather"), (x.sum(axis=0), "max")])
    large = np.arange(300_000.0).reshape(60, 5000)
    double, largest = f(large)
    np.testing.assert_array_equal(double, 2 * large)
    parts = np.array_split(large, RANKS)
    np.testing.assert_array_equal(largest, np.max([part.sum(axis=0) for part in parts], axis=0))


def test_updates_stay_with_their_rank_and_accumulate_over_slices(lab, rows):
    x, w = lab.tensor("x", 2), lab.shared(np.zeros(2), "w")
    step = synk.function([x], updates=[(w, w + x.sum(axis=0), "sum")])
    parts = np.array_split(rows, RANKS)
    step(rows)
    assert replicas(w) == [part.sum(axis=0).tolist() for part in parts]
    synk.broadcast(w, np.zeros(2))
    step(rows, num_slices=2)
    assert replicas(w) == [part.sum(axis=0).tolist() for part in parts]


def test_collectives_and_single_replicas(lab):
    w = lab.shared(np.zeros(2), "w")
    f = synk.function([], w.sum())
    for rank in range(RANKS):
        synk.set_value(rank, w, np.array([rank, 10.0]))
    assert f() == 11
    assert synk.gather(w).tolist() == [[0, 10], [1, 10], [2, 10]]
    assert synk.gather(w, nd_up=0).tolist() == [0, 10, 1, 10, 2, 10]
    assert synk.reduce(w, "max", in_place=False).tolist() == [2, 10]
    synk.all_reduce(w, weights=[1, 0, 3])
    assert replicas(w) == [[1.5, 10]] * RANKS
    synk.set_value(2, w, np.array([5.0, 5]))
    synk.broadcast(w)
    assert replicas(w) == [[1.5, 10]] * RANKS
    synk.all_gather(w)
    assert synk.get_lengths(w) == [6] * RANKS and synk.get_shapes([w]) == [[(6,)] * RANKS]
    synk.scatter(w, np.arange(7.0))
    assert replicas(w) == [[0, 1, 2], [3, 4], [5, 6]]
    with pytest.raises(ValueError, match=r"rank 0: \(3,\).*rank 1: \(2,\)"):
        synk.all_reduce(w)
    assert replicas(w) == [[0, 1, 2], [3, 4], [5, 6]]


def test_sliceable_variables_have_rows_of_their_own(lab):
    rows, w = lab.shared(np.zeros(3), "rows"), lab.shared(np.array(2.0), "w")
    f = synk.function([], [(rows * w, "gather"), rows.mean()], sliceable_shareds=[rows])
    synk.scatter(rows, np.arange(8.0))
    same, mean = f()
    assert same.tolist() == list(range(0, 16, 2)) and mean == 3.5
    assert f(batch_s=slice(0, 1))[0].tolist() == [0, 6, 12]
    assert f(batch_s=[[2, 0], [1], [0]], num_slices=2)[0].tolist() == [4, 0, 8, 12]


def test_functions_that_are_made_later_have_the_values_of_the_ranks(lab, rows):
    w = lab.shared(np.zeros(2), "w")
    first = synk.function([], w.sum())
    synk.distribute()
    synk.set_value(0, w, np.ones(2))
    x, new = lab.tensor("x", 2), lab.shared(np.array(3.0), "new")
    later = synk.function([x], [(x.sum() * new + w.sum(), "sum")], updates=[(new, new + 1)])
    assert first() == 2 / RANKS
    assert later(rows)[0] == 3 * rows.sum() + 2
    assert replicas(new) == [4] * RANKS and replicas(w) == [[1, 1], [0, 0], [0, 0]]


def test_streams_of_the_ranks_differ_and_are_seeded_again(lab):
    streams = lab.streams(3)
    draw = synk.function([], (lab.uniform(streams, (4,)), "gather"))
    first, second = draw(), draw()
    assert len({*first.tolist(), *second.tolist()}) == 2 * 4 * RANKS
    synk.reseed(streams, 3)
    np.testing.assert_array_equal(draw(), first)


def test_a_fused_step_is_one_command(lab, rows, monkeypatch):
    x, w = lab.tensor("x", 2), lab.shared(np.zeros(2), "w")
    gradient = synk.function([x], (x.mean(), "avg"), updates=[(w, x.mean(axis=0))])
    synk.distribute()
    transport, posts = current_world().transport, []
    post = transport.post
    monkeypatch.setattr(transport, "post", lambda *sent: (posts.append(sent), post(*sent)))
    with synk.fuse():
        mean = gradient(rows)
        synk.all_reduce(w, weights=gradient)
    assert len(posts) == 1 and mean.result() == rows.mean()
    np.testing.assert_allclose(replicas(w), [rows.mean(axis=0)] * RANKS)


class Counted(Command):
    """Returns how often it has been bound and run since, which only its own process knows."""

    def __init__(self, name):
        self.name = name

    def changed(self, change):
        return self if change is None else Counted(self.name + change)

    def run(self, state):
        return self.name, 0

    def bind(self, state):
        runs = itertools.count(1)
        return lambda change: (self.changed(change).name, next(runs))


@pytest.fixture
def sent(lab, monkeypatch):
    """What is sent to the workers from now on, unpickled."""
    world, found = current_world(), []
    world.start()
    post = world.transport.post

    def posted(payload, *needs):
        found.append(sent_form(payload))
        return post(payload, *needs)

    monkeypatch.setattr(world.transport, "post", posted)
    return found


def test_a_schedule_is_sent_and_bound_once(lab, sent):
    world = current_world()
    schedule = Schedule(world, Counted("a"))
    for number, change in enumerate((None, "b", None, "c"), 1):
        results = world.run(ScheduledRun(schedule, change) if change else schedule.again())
        assert results == [("a" + (change or ""), number)] * world.size
    number = schedule.number
    assert sent[0][:2] == (number, None) and sent[0][2].name == "a"
    assert sent[1:] == [(number, "b"), (number,), (number, "c")]


def test_a_schedule_that_has_failed_is_sent_again(lab, sent):
    world = current_world()
    schedule = Schedule(world, Fail([2]))
    for _ in range(2):
        with pytest.raises(synk.WorkerError, match="lost on rank 2"):
            world.run(schedule.again())
    assert [len(one) for one in sent] == [3, 3]


def test_a_schedule_is_current_for_the_same_data_in_the_same_place(lab):
    world, data, other = current_world(), synk.data(np.zeros(3)), synk.data(np.zeros(3))
    for one in (data, other):
        one.handle()
    schedule = Schedule(world, Counted("a"), [data])
    assert schedule.again([data]).change is None
    world.start()
    world.run(schedule.again([data]))
    assert schedule.again([data]) is schedule
    assert not any(schedule.again(values) for values in ([], [other], [data, other], [np.zeros(3)]))
    data[:] = 1
    assert schedule.again([data])
    data.set_value(np.zeros(4))
    assert schedule.again([data]) is None


def test_a_schedule_is_current_until_functions_change(lab):
    world, x = current_world(), lab.tensor("x", 1)
    before = Schedule(world, Counted("a"))
    assert before.again()
    total = synk.function([x], (x.sum(), "sum"))
    assert not before.again()
    before = Schedule(world, Counted("a"))
    assert before.again()
    del total
    gc.collect()
    assert not before.again()
    last = Schedule(world, Counted("a"))
    synk.close()
    assert last.again() is None


class Kept(Command):
    """Returns how many schedules a rank has."""

    def run(self, state):
        return len(state.schedules)


def test_schedules_that_are_dropped_do_not_accumulate(lab):
    world = current_world()
    world.start()
    for number in range(100):
        world.run(Schedule(world, Counted(str(number))).again())
    assert max(world.run(Kept())) < 40
    kept = Schedule(world, Counted("kept"))
    world.run(kept.again())
    for number in range(100):
        world.run(Schedule(world, Counted(str(number))).again())
    assert world.run(kept.again()) == [("kept", 2)] * world.size


def test_an_exception_of_a_worker_leaves_the_world_usable(lab, rows):
    x = lab.tensor("x", 2)
    f = synk.function([x], (x.sum(), "sum"))
    f(rows)
    for ranks in ([0], [2], [0, 2], [MASTER], [0, 1, 2]):
        error = LookupError if MASTER in ranks else synk.WorkerError
        with pytest.raises(error, match=f"lost on rank {MASTER if MASTER in ranks else ranks[0]}"):
            current_world().run(Fail(ranks))
        assert f(rows) == rows.sum()


def test_a_checkpoint_has_what_each_rank_had(lab, tmp_path):
    w, rows = lab.shared(np.zeros(2), "w"), lab.shared(np.zeros(3), "rows")
    streams = lab.streams(3)
    draw = synk.function([], [(lab.uniform(streams, (4,)), "gather"), w.sum() + rows.sum()])
    synk.scatter(rows, np.arange(7.0))
    synk.broadcast(w, np.array([1.0, 2]))
    draw()
    synk.save(tmp_path / "checkpoint", {"step": 5})
    before = draw()[0]
    synk.broadcast([w, rows], [np.zeros(2), np.zeros(1)])
    synk.scatter(rows, np.zeros(7))
    assert synk.load(tmp_path / "checkpoint") == {"step": 5}
    np.testing.assert_array_equal(draw()[0], before)
    assert replicas(w) == [[1, 2]] * RANKS and replicas(rows) == [[0, 1, 2], [3, 4], [5, 6]]


def test_a_closed_world_refuses_calls(lab, rows):
    x = lab.tensor("x", 2)
    f = synk.function([x], (x.sum(), "sum"))
    data = synk.data(rows)
    assert f(data) == rows.sum()
    synk.close()
    for call in (lambda: f(rows), lambda: data.data, lambda: synk.data(rows), synk.distribute):
        with pytest.raises(synk.ClosedError):
            call()


def test_programs_use_own_replicas_collectives_and_reports(lab, rows):
    x, w = lab.tensor("x", 2), lab.shared(np.zeros(2), "w")
    step = synk.function([x], [(x.sum(), "sum")], updates=[(w, w + x.sum(axis=0))])
    data = synk.data(rows)

    def program(rank, factor):
        total = 0.0
        for chosen in rank.minibatches(len(data), 2, epochs=2, seed=3):
            total += float(rank.call(step, data, batch=chosen)[0])
        rank.all_reduce(w, "sum")
        rank.report(total=factor * total)
        rank.broadcast(w)
        return rank.rank, total, type(data).__name__

    results = synk.spmd(program, factor=2)
    parts = np.array_split(rows, RANKS)
    assert results == [(rank, 2 * part.sum(), "Data") for rank, part in enumerate(parts)]
    assert [one["total"] for [one] in results.reports] == [4 * part.sum() for part in parts]
    assert replicas(w) == [(2 * rows.sum(axis=0)).tolist()] * RANKS


def test_ranks_of_a_program_learn_of_errors_and_stop(lab):
    w = lab.shared(np.zeros(2), "w")
    synk.function([], w.sum())

    def program(rank, how):
        if how == "fails" and rank.rank == 2:
            raise LookupError("lost")
        while not rank.should_stop:
            rank.barrier()
            if how == "stops" and rank.rank == 0:
                rank.stop()
        return how

    with pytest.raises(synk.WorkerError, match="LookupError: lost"):
        synk.spmd(program, "fails")
    assert synk.spmd(program, "stops") == ["stops"] * RANKS
