"""Tests of `profile`: its results, and that it leaves nothing installed."""

import contextlib
import json
import time

import numpy as np
import pytest

import synkhronos as synk
import theano
import theano.tensor as T
from synkhronos.extensions import loading, train, updates
from synkhronos.profiles.log import Event
from synkhronos.profiles.operations import Operation


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


def test_the_trace_can_be_read(step, tmp_path):
    path = tmp_path / "trace.json"
    with synk.profile(path) as profile:
        step()
    trace = json.loads(path.read_text())["traceEvents"]
    assert [one["args"]["name"] for one in trace if one["ph"] == "M"] == ["rank 0", "rank 1"]
    spans = [one for one in trace if one["ph"] == "X"]
    assert len(spans) == sum(map(len, profile.events))
    assert min(one["ts"] for one in spans) == 0 and all(one["dur"] > 0 for one in spans)


class _Names(synk.world.rank_state.Command):
    """Returns the names of callables in the instance dictionaries of this rank's objects."""

    def run(self, state):
        owners = [state, state.transport, state.engine, state.store, state.comm]
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


def large_step(world_of, kernels):
    """Return a step whose operations take longer than the microsecond that the clock can tell."""
    world_of(2, kernels=kernels)
    x, w = T.dmatrix("x"), theano.shared(np.ones(50_000), "w")
    loss = T.sqr(x.dot(w)).mean()
    train_minibatch = train.make_train_function(loss, [w], x, None, updates.momentum, 1e-9)
    rows = np.ones((20, 50_000))
    return lambda: train_minibatch(rows)


@pytest.mark.parametrize("kernels", ["theano", "fast"])
def test_operations_of_each_function_are_named_and_their_shares_sum_to_one(world_of, kernels):
    step = large_step(world_of, kernels)
    step()
    with synk.profile(operations=True) as profile:
        for _ in range(3):
            step()
    assert profile.seconds.shape == (3, 2, len(profile.categories))
    functions = {}
    for one in profile.operations:
        functions.setdefault(one.function, []).append(one)
    assert set(functions) == {"gradient", "update"}
    for own in functions.values():
        assert sum(one.share for one in own) == pytest.approx(1)
        assert [one.seconds for one in own] == sorted((one.seconds for one in own), reverse=True)
        assert all(one.nodes > 0 for one in own)
        for one in own:
            is_fast = one.kind.startswith("synkhronos.engines.theano.kernels.")
            assert one.kernel == ("fast" if is_fast else "Theano's own")
    assert any("gemv" in one.name.lower() for one in functions["gradient"])
    assert any(one.kernel == "fast" for one in profile.operations) == (kernels == "fast")
    table = profile.table(most=1)
    assert "gradient: " in table and " others " in table and "update: " in table
    assert profile._repr_html_().count("<table>") == 3
    # They are within the calls of the functions.
    compute = profile.seconds[:, :, profile.categories.index("compute")].mean()
    assert 0 < sum(one.seconds for one in profile.operations) <= compute


def test_steps_are_the_same_while_operations_are_timed(world_of):
    def results(block):
        world_of(2)
        x, w = T.dmatrix("x"), theano.shared(np.arange(3.0), "w")
        loss = T.sqr(x.dot(w)).mean()
        take = train.make_train_function(loss, [w], x, None, updates.momentum, 0.01)
        rows = np.arange(30.0).reshape(10, 3) / 30
        with block():
            losses = [float(take(rows)) for _ in range(4)]
        values = synk.gather(w)
        synk.close()
        return losses, values

    plain, timed = results(contextlib.nullcontext), results(lambda: synk.profile(operations=True))
    assert plain[0] == timed[0]
    np.testing.assert_array_equal(plain[1], timed[1])


def slowly(rows, draws):
    time.sleep(0.05)
    return rows


def test_the_wait_for_a_batch_of_a_loader_is_measured(two):
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    synk.distribute()
    with loading.Loader(np.ones(8), slowly, batch_size=4, processes=1) as loader:
        with synk.profile() as measured:
            for (rows,) in loader.epoch(0):
                f(rows)
    load = measured.seconds[:, :, measured.categories.index("load")]
    assert load.shape == (2, 2) and load[0, 0] > 0 and not load[:, 1].any()


def test_the_trace_has_the_operations_of_each_call(world_of, tmp_path):
    step = large_step(world_of, "theano")
    with synk.profile(tmp_path / "trace.json", operations=True) as profile:
        for _ in range(2):
            step()
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [one for one in trace if one["ph"] == "X"]
    nodes = [one for one in spans if one["cat"] == "operation" and "gemv" in one["name"].lower()]
    assert {(one["pid"], one["args"]["step"]) for one in nodes} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    calls = [one for one in spans if one["name"] == "gradient"]
    for one in nodes:
        assert [call for call in calls if call["pid"] == one["pid"] and inside(one, call)]
    every = sum(one["dur"] for one in spans if one["cat"] == "operation")
    assert 0 < every <= 1e6 * sum(2 * 2 * one.seconds for one in profile.operations) * 1.001


def inside(inner, outer):
    # The clock of the operations and that of the calls differ by some microseconds.
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 20


def test_functions_of_one_name_and_slices_are_summed_per_step(world_of):
    world_of(2, kernels="theano")
    x = T.dvector("x")
    first, second = (synk.function([x], (x.sum(), "sum"), name="f") for _ in range(2))
    with synk.profile(operations=True) as profile:
        first(np.ones(200_000), num_slices=2)
        second(np.ones(200_000))
    [one] = profile.operations
    assert (one.function, one.kind, one.nodes, one.share) == ("f", "theano.tensor.elemwise.Sum", 2, 1)


def test_the_picture_shows_the_ranks_and_the_first_operations(tmp_path):
    pytest.importorskip("matplotlib")
    measured = synk.Profile()
    measured._take([[Event(0, "compute", "gradient", 0.0, 1.0)] for _ in range(2)])
    measured.operations = [Operation("gradient", "Pool{max}", "theano.Pool", "fast", 2, 0.6, 0.6)]
    measured.plot(tmp_path / "profile.png", most=3)
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_operations_is_true_or_false(world_of):
    world_of(1)
    with pytest.raises(TypeError, match="operations: expected True or False, got 'gradient'"):
        with synk.profile(operations="gradient"):
            pass
    assert synk.world.world.current_world().rank_state.log is None


def test_a_function_whose_operations_cannot_be_timed_says_so_and_changes_nothing(two):
    x, w = T.dvector("x"), theano.shared(0.0, "w")
    mode = theano.Mode("c|py", "fast_run")
    f = synk.function([x], x.sum(), updates=[(w, w + 1)], mode=mode, name="f")
    with pytest.raises(ValueError, match="f: expected a function .*leave out operations=True"):
        with synk.profile(operations=True):
            f(np.ones(4))
    np.testing.assert_array_equal(synk.gather(w), [0, 0])
    with synk.profile() as profile:
        f(np.ones(4))
    assert len(profile.seconds) == 1 and profile.operations == []
