"""Tests of the loop that trains with a rule."""

import io
import json
import os
import signal
import sys
import time

import numpy as np
import pytest
from compilers import compiler, default_mode, tt
from processes import own_process

import synkhronos as synk
from synkhronos.extensions import rules, updates

ROWS = 42
FEATURES = np.random.RandomState(0).normal(size=(ROWS, 2))
TARGETS = FEATURES @ [2.0, -1.0] + 0.5
DATA = [FEATURES, TARGETS]
START = [np.array([0.3, -0.2]), np.array(0.1)]


class Model:
    """A linear model: its parameters, a step in two parts, a step in one, and the loss."""

    def __init__(self):
        self.params = [compiler.shared(START[0], "w"), compiler.shared(START[1], "b")]
        self.x, self.y = tt.dmatrix("x"), tt.dvector("y")
        w, b = self.params
        loss = tt.sqr(tt.dot(self.x, w) + b - self.y).mean()
        self.step = rules.make_step(
            loss, self.params, [self.x, self.y], updates.adam, learning_rate=0.05
        )
        gradients = zip(self.params, compiler.grad(loss, self.params))
        new = updates.apply_momentum(
            [(one, one - 0.05 * each) for one, each in gradients], self.params, 0.5
        )
        self.function = synk.function([self.x, self.y], [loss, w.sum()], updates=new, name="step")
        self.loss = synk.function([self.x, self.y], {"error": loss, "count": tt.ones_like(b)})
        errors = abs(tt.dot(self.x, w) + b - self.y)
        measured = {"total": (errors.sum(), "sum"), "worst": (errors.max(), "max")}
        self.measure = synk.function([self.x, self.y], measured)
        self.other = compiler.shared(np.zeros(3), "other")
        self.without = synk.function([self.x, self.y], loss + 0 * self.other.sum())
        synk.distribute()
        self.state = [shared for shared in self.step.update.get_shared()]
        self.state += [shared for shared in self.function.get_shared() if shared not in self.state]
        self.initial = [np.array(shared.get_value()) for shared in self.state]
        self.state = list(zip(self.state, self.initial))

    def reset(self):
        synk.broadcast(*map(list, zip(*self.state)))

    def train(self, rule, step=None, reset=True, **options):
        if reset:
            self.reset()
        options = {"batch_size": 5, "epochs": 3, "seed": 4, "progress": False, **options}
        step = self.step if step is None else step
        return rules.train(step, self.params, options.pop("data", DATA), rule, **options)

    def values(self):
        """Return the parameters of all ranks."""
        return [synk.gather(one).tolist() for one in self.params]


@pytest.fixture(scope="module")
def make_model(open_world):
    """A function that returns the model in a world of this many ranks, without C code."""
    made = {}

    def make(size):
        if size not in made:
            made.clear()
            open_world(size, timeout=60)
            with default_mode("FAST_COMPILE"):
                made[size] = Model()
        return made[size]

    return make


@pytest.fixture
def model(make_model):
    return make_model(2)


def serial_gradient(x, rows):
    errors = FEATURES[rows] @ x[:2] + x[2] - TARGETS[rows]
    return 2 * np.append(FEATURES[rows].T @ errors, errors.sum()) / len(rows)


def test_bsp_equals_the_serial_steps_on_the_rows_of_all_ranks(model):
    used = []

    class Noting(rules.BSP):
        def take_step(self, rank, step, data, rows):
            self.noted = np.concatenate(rank.exchange(rows))
            return super().take_step(rank, step, data, rows)

        def after_step(self, rank, params, step):
            super().after_step(rank, params, step)
            if rank.is_master:
                used.append(self.noted)

    record = model.train(Noting())
    x, mean, squares = np.append(*START), np.zeros(3), np.zeros(3)
    for number, rows in enumerate(used, 1):
        gradient = serial_gradient(x, rows)
        mean, squares = 0.9 * mean + 0.1 * gradient, 0.999 * squares + 0.001 * gradient**2
        rate = 0.05 * np.sqrt(1 - 0.999**number) / (1 - 0.9**number)
        x = x - rate * mean / (np.sqrt(squares) + 1e-8)
    assert np.allclose(np.concatenate([one.get_value().ravel() for one in model.params]), x, rtol=1e-9)
    assert synk.in_sync(model.params)
    epochs = [np.concatenate(used[start : start + 5]) for start in (0, 5, 10)]
    assert all(np.array_equal(np.sort(each), np.arange(ROWS)) for each in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    assert [len(losses) for losses in record.losses] == [len(used)] * 2


def test_bsp_is_verified_before_it_begins(model):
    w, x, y = compiler.shared(np.zeros(2), "w"), tt.dmatrix("x"), tt.dvector("y")
    loss = tt.sqrt(tt.sqr(tt.dot(x, w) - y).mean())
    step = rules.make_step(loss, [w], [x, y], updates.sgd, learning_rate=0.01)
    options = {"batch_size": 5, "progress": False}
    with pytest.warns(synk.SynkhronosWarning, match="a nonlinear function of a value of all rows"):
        rules.train(step, [w], DATA, rules.BSP(), **options)
    rules.train(step, [w], DATA, rules.BSP(), **options)
    rules.train(step, [w], DATA, rules.EASGD(), **options)


@pytest.mark.parametrize("by, rows", [("all", DATA), ("one", [np.zeros((2001, 2)), np.ones(2001)])])
def test_a_validation_is_verified_before_it_begins(model, by, rows):
    root = synk.function([model.x, model.y], tt.sqrt(tt.sqr(model.x.sum(axis=1) - model.y).mean()))
    with pytest.warns(synk.SynkhronosWarning, match="a nonlinear function of a value of all rows"):
        model.train(rules.BSP(), validate=(root, rows), validate_by=by, epochs=0)


@pytest.mark.parametrize("rule", [rules.LocalSGD(2), rules.EASGD(0.5, 2), rules.GoSGD(0.2)])
def test_the_record_has_every_step_of_every_rank(model, rule, tmp_path):
    record = model.train(rule, model.function, epochs=4, validate=(model.loss, DATA))
    per_epoch = synk.Rank.n_minibatches(ROWS, 2, 5)
    for losses, seconds, samples in zip(record.losses, record.seconds, record.samples):
        assert len(losses) == len(seconds) == len(samples) == 4 * per_epoch
        assert samples[per_epoch - 1 :: per_epoch] == [21, 42, 63, 84]
        assert all(np.diff(seconds) > 0)
    assert np.mean(record.losses[0][-3:]) < np.mean(record.losses[0][:3]) / 5
    assert not record.stopped and not record.interrupted
    assert sorted(one["epoch"] for one in record.validations) == [1, 2, 3, 4]
    at_start = np.square(FEATURES @ START[0] + START[1] - TARGETS).mean()
    assert record.validations[-1]["error"] < at_start / 5
    assert all(np.isclose(one["count"], 1) for one in record.validations)
    expected = {None} if rule.is_synchronous else {0, 1}
    assert {one["rank"] for one in record.validations} == expected
    assert synk.in_sync(model.params)

    record.save(tmp_path / "record.json")
    loaded = rules.Record.load(tmp_path / "record.json")
    assert vars(loaded) == vars(record)
    (tmp_path / "record.json").write_text("[1]")
    with pytest.raises(ValueError, match="not a record of a training"):
        rules.Record.load(tmp_path / "record.json")


def test_the_record_is_drawn_or_says_what_is_missing(model, tmp_path, monkeypatch):
    record = model.train(rules.EASGD(), epochs=2, validate=(model.loss, DATA))
    pytest.importorskip("matplotlib")
    record.plot(tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="needs matplotlib: pip install matplotlib"):
        record.plot(tmp_path / "losses.png")


def test_one_rank_validates_the_value_in_its_turn_and_its_parameters_return(model):
    w = model.params[0]

    class Noting(rules.EASGD):
        own = None

        def value(self, rank, params):
            self.own = w.get_value()
            return [np.full(2, 7.0), np.array(8.0)]

        def take_step(self, rank, step, data, rows):
            assert self.own is None or np.array_equal(w.get_value(), self.own)
            self.own = None
            return super().take_step(rank, step, data, rows)

    def validate(rank):
        return {"number": rank.rank, "w": w.get_value()[0]}

    record = model.train(Noting(0.5, 1), validate=validate, epochs=4)
    assert [one["w"] for one in record.validations] == [7] * 4
    assert all(one["number"] == one["rank"] == one["epoch"] % 2 for one in record.validations)


@pytest.mark.parametrize("rule", [rules.EASGD(0.5, 2), rules.BSP(3, "params")])
def test_all_ranks_validate_together_each_on_its_share(model, rule):
    odd = [FEATURES[:7], TARGETS[:7]]
    record = model.train(rule, validate=(model.loss, odd), validate_by="all", epochs=1)
    assert [one["rank"] for one in record.validations] == [None]
    w, b = (one.get_value() for one in model.params)  # the center, or the average
    error = np.mean((odd[0] @ w + b - odd[1]) ** 2)
    assert record.validations[0]["error"] == pytest.approx(error)

    def weigh(rank):
        return {"rows": 1 + 2 * rank.rank, "share": 10 * rank.rank}

    record = model.train(rule, validate=(model.measure, odd), validate_by="all", epochs=1)
    w, b = (one.get_value() for one in model.params)
    errors = abs(odd[0] @ w + b - odd[1])
    assert record.validations[0]["total"] == pytest.approx(errors.sum())
    assert record.validations[0]["worst"] == pytest.approx(errors.max())
    record = model.train(rule, validate=weigh, validate_by="all", epochs=1)
    assert record.validations[0]["share"] == pytest.approx((1 * 0 + 3 * 10) / 4)

    def measure_on_one(rank):
        return {"rows": rank.rank, "other": 5.0} if rank.rank else {"share": 1.0}

    record = model.train(rule, validate=measure_on_one, validate_by="all", epochs=1)
    assert record.validations[0]["share"] == 1 and record.validations[0]["other"] == 5
    record = model.train(rule, validate=lambda rank: {"rows": 0}, validate_by="all", epochs=1)
    assert "share" not in record.validations[0]


def test_a_report_may_ask_the_controller_change_the_rule_and_stop(model):
    class Controller:
        def __init__(self):
            self.asked = {}

        def __call__(self, request, rank, info):
            self.asked[rank] = self.asked.get(rank, 0) + 1
            return len(self.asked) == synk_size and min(self.asked.values()) >= 3

    def report(rank, rule, step, loss):
        rule.period = 1 + step % 2
        rank.report(period=rule.period)
        time.sleep(1e-3)  # until the others have begun
        if rank.ask("patience", loss):
            rank.stop()

    synk_size, epochs = synk.size(), 2000  # a rank may run alone for a while
    record = model.train(rules.EASGD(), epochs=epochs, report=report, controller=Controller())
    assert record.stopped and not record.interrupted
    assert all(3 <= len(losses) < epochs for losses in record.losses)


@pytest.mark.parametrize("rule", [rules.LocalSGD(3), rules.SSP()])
def test_ranks_stop_together_or_at_once(model, rule):
    def report(rank, rule, step, loss):
        if step == 4 and rank.rank == 1:
            rank.stop()

    record = model.train(rule, epochs=1000, report=report)
    steps = [len(losses) for losses in record.losses]
    assert record.stopped and max(steps) < 900
    assert not rule.is_synchronous or steps == [6, 6]
    assert synk.in_sync(model.params)


class Killed(Exception):
    pass


def kill_at(rank_number, step_number):
    def report(rank, rule, step, loss):
        if rank.rank == rank_number and step == step_number:
            raise Killed

    return report


FIXED = [rules.BSP(), rules.BSP(period=4), rules.LocalSGD(4), rules.DiLoCo(4)]
ON_ONE = [rules.EASGD(0.3, 2, 0.5), rules.Downpour(2, 3), rules.SSP(), rules.GoSGD(0.5)]


@pytest.mark.parametrize("size, rule", [*((2, one) for one in FIXED), *((1, one) for one in ON_ONE)])
def test_a_training_that_was_killed_goes_on_bit_for_bit(make_model, size, rule, tmp_path):
    model = make_model(size)
    step = model.step if isinstance(rule, rules.BSP) else model.function
    options = {"epochs": 4, "validate": (model.loss, DATA), "validate_by": "all"}
    record = model.train(rule, step, checkpoint=tmp_path / "whole", **options)
    values = model.values()
    # An epoch has five steps on two ranks, and nine on one.
    with pytest.raises((Killed, synk.WorkerError)):
        model.train(rule, step, checkpoint=tmp_path / "killed", report=kill_at(size - 1, 13), **options)
    options["seed"] = None  # it is in the checkpoint
    resumed = model.train(rule, step, checkpoint=tmp_path / "killed", **options)
    assert model.values() == values
    assert resumed.losses == record.losses and resumed.samples == record.samples
    assert [one["error"] for one in resumed.validations] == [one["error"] for one in record.validations]
    if isinstance(rule, (rules.LocalSGD, rules.GoSGD)):  # no exchange is made for a checkpoint
        model.train(rule, step, epochs=4)
        assert model.values() == values


@pytest.mark.parametrize("rule", [rules.LocalSGD(4), rules.GoSGD(0)])
def test_a_training_that_was_killed_before_its_first_epoch_begins_where_it_began(model, rule, tmp_path):
    whole = model.train(rule, model.function)
    values = model.values()
    options = {"checkpoint": tmp_path / "kept", "seed": None}
    with pytest.raises((Killed, synk.WorkerError)):
        model.train(rule, model.function, report=kill_at(1, 3), **{**options, "seed": 4})
    assert model.values()[0] != [START[0].tolist()] * 2
    resumed = model.train(rule, model.function, reset=False, **options)
    assert resumed.losses == whole.losses and model.values() == values


def test_a_training_that_was_stopped_goes_on_in_the_middle_of_an_epoch(make_model, tmp_path):
    model = make_model(2)

    def report(rank, rule, step, loss):
        if step == 7:
            rank.stop()

    rule, options = rules.LocalSGD(3), {"checkpoint": tmp_path / "kept", "checkpoint_every": 2}
    whole = model.train(rule, epochs=4)
    values = model.values()
    stopped = model.train(rule, epochs=4, report=report, **options)
    assert stopped.stopped and len(stopped.losses[0]) == 9 and synk.in_sync(model.params)
    resumed = model.train(rule, epochs=4, **options)
    assert not resumed.stopped and resumed.losses == whole.losses
    assert model.values() == values
    again = model.train(rule, epochs=4, **options)  # nothing is left to do
    assert again.losses == whole.losses and model.values() == values
    longer = model.train(rule, epochs=5, **options)
    assert len(longer.losses[0]) == 25


@pytest.mark.parametrize("rule", [rules.EASGD(0.3, 2), rules.Downpour(2, 3), rules.GoSGD(0.5)])
def test_what_is_on_its_way_is_in_the_checkpoint(make_model, rule, tmp_path):
    model = make_model(2)
    options = {"checkpoint": tmp_path / "kept", "checkpoint_every": 3}
    record = model.train(rule, model.function, epochs=9, **options)
    assert synk.in_sync(model.params)
    assert np.mean(record.losses[0][-3:]) < np.mean(record.losses[0][:3]) / 5
    if isinstance(rule, rules.GoSGD):
        header = json.loads(synk.load(tmp_path / "kept")["rules.train"])
        weights = [state["weight"][1] for state in header["states"]]
        assert sum(weights) == pytest.approx(1, abs=1e-12)


def test_hyper_parameters_come_with_the_checkpoint(make_model, tmp_path):
    model = make_model(2)

    def report(rank, rule, step, loss):
        rule.period = 2 if step > 3 else 1
        if step == 12:
            rank.stop()

    seen = []

    def look(rank, rule, step, loss):
        if rank.is_master:
            seen.append(rule.period)

    model.train(rules.LocalSGD(1), epochs=4, report=report, checkpoint=tmp_path / "kept")
    model.train(rules.LocalSGD(1), epochs=4, report=look, checkpoint=tmp_path / "kept")
    assert seen and set(seen) == {2}


@pytest.mark.parametrize("push, pull", [(1, 1), (4, 3), (3, 2), (5, 4), (2, 7)])
@pytest.mark.parametrize("every", [None, 1])
def test_no_step_is_lost_by_downpour(make_model, tmp_path, push, pull, every):
    make_model(2)
    count, x = compiler.shared(0.0, "count"), tt.dvector("x")
    step = synk.function([x], count.sum(), updates=[(count, count + x.mean())], mode="FAST_COMPILE")
    options = {} if every is None else {"checkpoint": tmp_path / "kept", "checkpoint_every": every}
    rules.train(step, [count], [np.ones(ROWS)], rules.Downpour(push, pull), 5, 6, seed=1,
                progress=False, **options)  # fmt: skip
    assert synk.gather(count).tolist() == [2 * 6 * 5] * 2


def test_a_rule_that_raises_ends_all_ranks(make_model):
    model = make_model(2)

    class Failing(rules.EASGD):
        def after_step(self, rank, params, step):
            if rank.rank == 1 and step == 3:
                raise ZeroDivisionError("on purpose")
            time.sleep(0.01)

    began = time.monotonic()
    with pytest.raises(synk.WorkerError, match="rank 1 raised ZeroDivisionError: on purpose"):
        model.train(Failing(), epochs=1000)
    assert time.monotonic() < began + 5
    assert len(model.train(rules.EASGD(), epochs=1).losses[1]) == 5


def test_a_loss_that_is_no_number_stops_with_a_sentence(model):
    data = [FEATURES, np.where(np.arange(ROWS) == 30, np.nan, TARGETS)]
    with pytest.raises(
        (FloatingPointError, synk.WorkerError), match=r"the loss is nan at step \d of rank 1"
    ):
        model.train(rules.SSP(), data=data)


@own_process
def test_the_first_interrupt_ends_with_a_record():
    synk.fork(2, use_gpu=False)
    w, x = compiler.shared(0.0, "w"), tt.dvector("x")
    step = synk.function([x], w.sum(), updates=[(w, w + 0.1 * (x.mean() - w))], mode="FAST_COMPILE")

    def report(rank, rule, number, loss):
        time.sleep(0.005)
        if rank.is_master and number == 20:
            os.kill(os.getpid(), signal.SIGINT)

    for rule in (rules.LocalSGD(2), rules.EASGD()):
        record = rules.train(step, [w], [np.ones(100)], rule, 5, epochs=1000, report=report)
        assert record.stopped and record.interrupted and len(record.losses[0]) < 1000
        assert synk.in_sync(w)
    synk.close()


@own_process
def test_a_rank_that_takes_over_has_the_hyper_parameters_but_no_weight_and_no_state(tmp_path):
    synk.fork(2, use_gpu=False)
    w, x = compiler.shared(0.0, "w"), tt.dvector("x")
    step = synk.function([x], w.sum(), updates=[(w, w + x.mean())], mode="FAST_COMPILE")
    path = tmp_path / "noted"

    class Noting(rules.GoSGD):
        def start(self, rank, params):
            super().start(rank, params)
            with open(path, "a") as file:
                noted = [rank.rank, rank.restarts, self.weight, self.probability, bool(self.restored)]
                file.write(json.dumps([*noted, self.seed]) + "\n")

    def report(rank, rule, number, loss):
        if number == 8:
            rule.probability = 0.25
        if rank.rank == 1 and number == 13 and not rank.restarts:
            os.kill(os.getpid(), signal.SIGKILL)

    options = {"batch_size": 5, "seed": 3, "on_death": "continue", "report": report, "progress": False}
    rules.train(step, [w], [np.ones(80)], Noting(0), epochs=2, checkpoint=tmp_path / "kept", **options)
    began = sorted(json.loads(line) for line in path.read_text().splitlines())
    assert [one for one in began if one[1]] == [[1, 1, 0.0, 0.25, False, 3]]
    for rank in range(2):  # it begins twice, and once more to finish
        first, *others = [one for one in began if one[:2] == [rank, 0] and not one[4]]
        assert first == [rank, 0, 0.5, 0.0, False, 3] and not others
        assert [rank, 0, 0.5, 0.25, True, 3] in began
    synk.close()


@own_process
def test_the_record_survives_a_death_at_any_point(tmp_path):
    """A rank dies in a step, after an exchange, in validations, and after its last step."""
    synk.fork(2, use_gpu=False)
    w, x = compiler.shared(0.0, "w"), tt.dvector("x")
    step = synk.function([x], w.sum(), updates=[(w, w + x.mean())], mode="FAST_COMPILE")
    points = [("take", 3), ("validate", 1), ("after", 14), ("validate", 9), ("state", 40)]

    def die_at(rank, *point):
        if rank.rank == 1 and not rank.memory(f"died at {point}", 1)[0] and point in points:
            rank.memory(f"died at {point}", 1)[0] = 1
            os.kill(os.getpid(), signal.SIGKILL)

    class Dying(rules.SSP):
        def take_step(self, rank, step, data, rows):
            die_at(rank, "take", rank.clock)
            return super().take_step(rank, step, data, rows)

        def after_step(self, rank, params, step):
            super().after_step(rank, params, step)
            die_at(rank, "after", step)
            self._step = step

        def state(self, rank, params):
            die_at(rank, "state", getattr(self, "_step", 0))
            return super().state(rank, params)

    def validate(rank):
        die_at(rank, "validate", rank.clock // 4)
        return {"clock": rank.clock}

    options = {"batch_size": 5, "epochs": 10, "validate": validate, "on_death": "continue"}
    options = {**options, "progress": False, "seed": 3, "checkpoint": tmp_path / "kept"}
    record = rules.train(step, [w], [np.ones(40)], Dying(1), checkpoint_every=5, **options)
    for losses, seconds, samples in zip(record.losses, record.seconds, record.samples):
        assert len(losses) == 40 and all(np.diff(seconds) > 0)
        assert samples == list(range(5, 201, 5))
    points = sorted((one["epoch"], one["step"], one["clock"]) for one in record.validations)
    assert points == [(epoch, 4 * epoch, 4 * epoch) for epoch in range(1, 11)]
    synk.close()


def test_progress_is_shown_beside_reports_of_the_script(model, monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_PROGRESS", "1")
    for name in ("DELAY", "INTERVAL", "PAUSE"):
        monkeypatch.setattr(rules.record, name, 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())

    def report(rank, rule, step, loss):
        rank.report(period=rule.period)

    class Reporting(rules.LocalSGD):
        def after_step(self, rank, params, step):
            super().after_step(rank, params, step)
            if rank.rank == 1:
                report(rank, self, step, 0.0)
            rank.barrier()  # rank 0 reads the latest report of rank 1, which the rule has made

    model.train(Reporting(), progress=True, report=report)
    lines = sys.stderr.getvalue().splitlines()
    assert lines[-1].startswith("synkhronos: training, epoch 3/3; loss ")


def test_progress_is_a_line_where_stderr_is_no_terminal(model, monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_PROGRESS", "1")
    monkeypatch.setattr(rules.record, "DELAY", 0.0)
    monkeypatch.setattr(rules.record, "INTERVAL", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    model.train(rules.EASGD(), progress=True)
    [line] = sys.stderr.getvalue().splitlines()
    assert line.startswith("synkhronos: training, epoch 1/3; loss ") and "rows/s" in line
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    model.train(rules.EASGD(), progress=False)
    monkeypatch.setenv("SYNKHRONOS_PROGRESS", "0")
    model.train(rules.EASGD(), progress=True)
    assert sys.stderr.getvalue() == ""


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"rule": "EASGD"}, TypeError, "expected a Rule, such as rules.EASGD"),
        ({"rule": rules.BSP(), "step": "function"}, TypeError, "build it with rules.make_step"),
        ({"step": "without"}, ValueError, "some that it does not: w, b"),
        ({"step": print}, TypeError, "step: expected a function built with synk.function"),
        ({"data": [FEATURES, TARGETS[1:]]}, ValueError, r"equal numbers of rows, got \[42, 41\]"),
        ({"data": [FEATURES[:1], TARGETS[:1]]}, ValueError, "each of the 2 ranks, got 1 row"),
        ({"data": FEATURES}, TypeError, "put a single one in a list"),
        ({"data": []}, ValueError, "at least one array"),
        ({"data": [FEATURES, TARGETS, TARGETS]}, TypeError, "1 to 2 arrays, got 3"),
        ({"batch_size": 0}, ValueError, "batch_size: expected at least 1, got 0"),
        ({"batch_size": 2.5}, TypeError, "batch_size: expected an int"),
        ({"epochs": -1}, ValueError, "epochs: expected at least 0"),
        ({"validate": 3}, TypeError, "validate: expected"),
        ({"validate_by": "two"}, ValueError, r"validate_by: expected one of \['all', 'one'\]"),
        ({"report": 1}, TypeError, "report: expected a function"),
        ({"seed": "s"}, TypeError, "seed: expected an int"),
        ({"checkpoint": "/nowhere/at/all"}, FileNotFoundError, "there is no folder '/nowhere/at'"),
        ({"checkpoint": "/"}, IsADirectoryError, "expected the path of a file"),
        ({"checkpoint": 5}, TypeError, "checkpoint: expected a path"),
        ({"checkpoint_every": 0}, ValueError, "checkpoint_every: expected at least 1"),
        ({"on_death": "continue", "rule": rules.LocalSGD()}, ValueError, "which LocalSGD.*uses"),
        ({"on_death": "continue", "validate_by": "all"}, ValueError, "validate_by='all' uses"),
        ({"on_death": "stop"}, ValueError, r"on_death: expected one of \['continue', 'raise'\]"),
        ({"controller": 3}, TypeError, "controller: expected a function"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_words_before_anything_starts(model, changes, error, message):
    changes = dict(changes)
    step = changes.pop("step", "step")
    step = getattr(model, step) if isinstance(step, str) else step
    with pytest.raises(error, match=message):
        model.train(changes.pop("rule", rules.EASGD()), step, **changes)
    assert model.values() == [[one.tolist()] * 2 for one in START]


def test_an_input_without_data_is_named(model):
    with pytest.raises((TypeError, synk.WorkerError), match="no value for input 'y'; give one"):
        model.train(rules.EASGD(), data=[FEATURES])


def test_a_checkpoint_of_something_else_is_refused_and_nothing_is_changed(make_model, tmp_path):
    model = make_model(2)
    synk.save(tmp_path / "other")
    model.train(rules.EASGD(), checkpoint=tmp_path / "kept", epochs=1)
    for name, rule, changes, error, message in (
        ("other", rules.EASGD(), {}, ValueError, "was not saved by rules.train"),
        ("kept", rules.SSP(), {"batch_size": 4}, ValueError,
         "rule was 'EASGD', is 'SSP'; batch_size was 5, is 4"),
        ("kept", rules.EASGD(), {"seed": 5}, ValueError, "has the seed 4, got 5"),
        ("kept", rules.EASGD(), {"controller": 3}, TypeError, "controller: expected"),
        ("kept", rules.EASGD(), {"on_death": "stop"}, ValueError, "on_death: expected"),
    ):  # fmt: skip
        model.reset()
        for rank in range(2):
            synk.set_value(rank, model.params[0], [7.0, rank])
        before = [synk.gather(shared).tolist() for shared, _ in model.state]
        with pytest.raises(error, match=message):
            model.train(rule, reset=False, checkpoint=tmp_path / name, **changes)
        assert [synk.gather(shared).tolist() for shared, _ in model.state] == before
