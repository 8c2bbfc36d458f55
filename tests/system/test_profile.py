"""Tests of `profile`: its results, and that it leaves nothing installed."""

import contextlib
import json
import time

import numpy as np
import pytest

import synkhronos as synk
import theano
import theano.tensor as T
from synkhronos.engines.timing import OperationTime
from synkhronos.extensions import loading, train, updates
from synkhronos.profiles.drawing import make_figure
from synkhronos.profiles.log import Event
from synkhronos.profiles.operations import Operation, of_ranks


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
    np.testing.assert_array_equal(measured.seconds, [[[1.0, 2.0, 0.0, 0.0, 0.0, 2.0]]])


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


def test_the_wait_for_a_batch_of_a_loader_is_measured(world_of):
    world_of(2)
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


def operation(function, name, seconds, share, kernel="Theano's own"):
    return Operation(function, name, f"theano.{name.partition('{')[0]}", kernel, 2, seconds, share)


OPERATIONS = [
    operation("gradient", "Pool{max}", 0.6, 0.6, "fast"),
    operation("gradient", "Long{" + 100 * "x" + "}", 0.3, 0.3),
    operation("gradient", "Sum{0}", 0.06, 0.06),
    operation("gradient", "Sum{1}", 0.04, 0.04),
    operation("update", "Add", 0.001, 1.0),
]


def made_up_profile():
    measured = synk.Profile()
    measured._take([[Event(0, "compute", "gradient", 0.0, 1.0)] for _ in range(2)])
    measured.operations = OPERATIONS
    return measured


def test_the_table_lists_the_first_operations_and_sums_up_the_others():
    blank, title, header, pool, cut, others, _, update, _, add = (
        made_up_profile().table(most=2).splitlines()[-10:]
    )
    assert (blank, title) == ("", "gradient: 1000.000 ms per step in 8 nodes, mean of the ranks")
    assert header.split() == ["operation", "class", "nodes", "ms", "share", "kernel"]
    assert pool.split() == ["Pool{max}", "Pool", "2", "600.000", "60.0%", "fast"]
    assert cut.startswith("Long{xx") and "x...x" in cut and cut.endswith("  30.0%  Theano's own")
    assert others.split() == ["2", "others", "4", "100.000", "10.0%"]
    assert update.startswith("update: 1.000 ms") and add.startswith("Add ")
    assert len(set(map(len, (pool.partition("60.0%")[0], cut.partition("30.0%")[0])))) == 1
    html = made_up_profile()._repr_html_()
    assert html.count("<table>") == 3 and "Pool{max}" in html


def test_operations_of_ranks_are_averaged_and_sorted():
    own = [
        ("f", [OperationTime("a", "m.A", "fast", 2, 4.0), OperationTime("b", "m.B", "m's own", 1, 2.0)]),
        ("g", [OperationTime("a", "m.A", "fast", 1, 20.0)]),
    ]
    found = of_ranks([own, [("f", [OperationTime("b", "m.B", "m's own", 3, 8.0)])]], steps=2)
    assert found == [
        ("g", "a", "m.A", "fast", 1, 5.0, 1.0),
        ("f", "b", "m.B", "m's own", 3, 2.5, 2.5 / 3.5),
        ("f", "a", "m.A", "fast", 2, 1.0, 1.0 / 3.5),
    ]


def texts_of(figure):
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    for axes in figure.axes:
        found += [axes.get_title(loc="left")]
        found += [label.get_text() for label in axes.get_yticklabels()]
    return found


def test_the_picture_shows_the_ranks_and_the_first_operations(tmp_path):
    pytest.importorskip("matplotlib")
    measured = made_up_profile()
    measured.plot(tmp_path / "profile.png", most=3)
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    figure = make_figure(measured.seconds, measured.categories, ["rank 0", "rank 1"], OPERATIONS, 3)
    texts = texts_of(figure)
    for wanted in ("rank 1", "gradient: 1000 ms, mean of the ranks", "Pool{max} × 2", "600 ms, 60%"):
        assert wanted in texts
    assert "1 others, 2 nodes" in texts
    assert not [one for one in texts if "update" in one]  # takes a thousandth
    bars = [patch for patch in figure.axes[1].patches if patch.get_width() in (600, 300)]
    assert len({bar.get_facecolor() for bar in bars}) == 2
    plain = make_figure(measured.seconds, measured.categories, ["rank 0", "rank 1"], [], 3)
    assert len(plain.axes) == 1


def test_operations_is_true_or_false(world_of):
    world_of(1)
    with pytest.raises(TypeError, match="operations: expected True or False, got 'gradient'"):
        with synk.profile(operations="gradient"):
            pass
    assert synk.world.world.current_world().here.log is None


def test_a_function_whose_operations_cannot_be_timed_says_so_and_changes_nothing(world_of):
    world_of(2)
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


def test_nothing_is_timed_after_the_block(step):
    step()
    world = synk.world.world.current_world()
    before = world.run(_Names())
    with synk.profile(operations=True) as profile:
        step()
    assert world.run(_Names()) == before and profile.operations
    for function in world.here.functions.values():
        assert not function.compiled.fn.time_thunks and not any(function.compiled.fn.call_counts)
