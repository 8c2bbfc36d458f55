"""Tests of `profile`: its results, and that it leaves nothing installed."""

import json

import numpy as np
import pytest

import synkhronos as synk
import theano
import theano.tensor as T
from synkhronos._profile import Event
from synkhronos.extensions import train, updates


@pytest.fixture
def step(world_of):
    world_of(2)
    x, y = T.dmatrix("x"), T.dvector("y")
    w = theano.shared(np.zeros(50), "w")
    loss = ((x.dot(w) - y) ** 2).mean()
    train_minibatch = train.make_train_function(loss, [w], x, y, updates.sgd, 0.001)
    synk.distribute()
    data = synk.data(np.ones((400, 50))), synk.data(np.ones(400))
    return lambda: train_minibatch(*data, batch=np.arange(300)[::-1])


def test_every_step_and_rank_is_measured(step):
    with synk.profile() as profile:
        for _ in range(5):
            step()
    assert profile.seconds.shape == (5, 2, len(profile.categories))
    seconds = dict(zip(profile.categories, np.moveaxis(profile.seconds, -1, 0)))
    for category in ("compute", "copy", "reduce", "wait"):
        assert (seconds[category] > 0).all(), category
    # What is left of a command, which may be less than the clock can tell.
    assert (seconds["other"] >= 0).all() and seconds["other"].sum() > 0
    for events in profile.events:
        names = [event.name for event in events if event.category == "compute"]
        assert names == ["gradient", "update"] * 5
        commands = [event for event in events if event.category == "command"]
        assert [event.step for event in commands] == list(range(5))
        for rank_seconds, command in zip(profile.seconds[:, profile.events.index(events)], commands):
            early = [one for one in events if one.start < command.start and one.step == command.step]
            before = [one.seconds for one in early]
            assert rank_seconds.sum() == pytest.approx(command.seconds + sum(before))
    # The ranks' clocks agree: each worker's command is within the master's.
    commands = [[one for one in events if one.category == "command"] for events in profile.events]
    for mine, others in zip(*commands):
        assert mine.start <= others.start
        assert others.start + others.seconds <= mine.start + mine.seconds


def test_what_the_master_copies_before_a_command_is_not_a_part_of_the_command():
    copy, compute = Event(0, "copy", "place", 0.0, 2.0), Event(0, "compute", "f", 2.5, 1.0)
    measured = synk.Profile()
    measured._take([[copy, compute, Event(0, "command", "run", 2.0, 3.0)]])
    np.testing.assert_array_equal(measured.seconds, [[[1.0, 2.0, 0.0, 0.0, 2.0]]])


def test_the_table_names_categories_and_ranks(step):
    with synk.profile() as profile:
        step()
    title, header, *rows = str(profile).splitlines()
    assert title.startswith("1 steps")
    assert header.split() == ["rank", *profile.categories, "all"]
    assert [row.split()[0] for row in rows] == ["0", "1"]


def test_the_trace_can_be_read(step, tmp_path):
    path = tmp_path / "trace.json"
    with synk.profile(path) as profile:
        step()
    trace = json.loads(path.read_text())["traceEvents"]
    assert [one["args"]["name"] for one in trace if one["ph"] == "M"] == ["rank 0", "rank 1"]
    spans = [one for one in trace if one["ph"] == "X"]
    assert len(spans) == sum(map(len, profile.events))
    assert min(one["ts"] for one in spans) == 0 and all(one["dur"] > 0 for one in spans)


class _Names(synk.world.here.Command):
    """Returns the names of callables in the instance dictionaries of this rank's objects."""

    def run(self, here):
        owners = [here, here.transport, here.engine, here.store, here.comm]
        return [name for one in owners for name, own in vars(one).items() if callable(own)]


def test_nothing_is_left_when_it_is_off(step):
    step()
    world = synk.world.world.current_world()
    before, own = world.run(_Names()), set(vars(world))
    with synk.profile():
        step()
        assert world.run(_Names()) != before
    assert world.run(_Names()) == before and set(vars(world)) == own


def test_an_error_in_the_block_ends_the_measurement(step):
    with pytest.raises(ZeroDivisionError):
        with synk.profile() as profile:
            step()
            raise ZeroDivisionError
    assert len(profile.seconds) == 1
    with synk.profile() as profile:
        step()
    assert len(profile.seconds) == 1


def test_blocks_cannot_be_nested(step):
    with synk.profile():
        with pytest.raises(RuntimeError, match="nested"):
            with synk.profile():
                pass
        step()


def test_one_process_is_measured_too(world_of):
    world_of(1)
    x = T.dvector("x")
    f = synk.function([x], x.mean(), name="mean")
    with synk.profile() as profile:
        f(np.ones(3))
    assert [event.name for event in profile.events[0] if event.category == "compute"] == ["mean"]
