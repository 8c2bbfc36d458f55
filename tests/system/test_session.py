"""Tests of sessions: the contract, each rule on the small digits, equality, resuming, and failures."""

import inspect
import os
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from compilers import default_mode, run_examples
from processes import own_process

pytest.importorskip("sklearn")

from session_models import Empty, Late, Model, Silent, WithScale

import synkhronos as synk
from synkhronos.extensions import rules
from synkhronos.extensions.session import Recorder, Session, compare

ERRORS = (TypeError, ValueError, RuntimeError, FloatingPointError, synk.SynkhronosError)


@pytest.fixture(scope="module")
def fork(open_world):
    """Function that opens a world of a number of ranks, unless it is open."""

    def fork_it(size):
        if not (synk.is_forked() and synk.size() == size):
            open_world(size, timeout=60)

    with default_mode("FAST_COMPILE"):
        yield fork_it


@pytest.fixture
def two(fork):
    fork(2)


def train(rule="BSP", model=Model, recorder=None, checkpoint=None, **options):
    """Train, and return the record, with the parameters of the master's model."""
    session_options = ("sync_type", "scale_lr", "warmup", "seed", "checkpoint_every", "devices")
    given = {name: options.pop(name) for name in session_options if name in options}
    session = Session(
        model, rule, recorder=recorder or Recorder(print_every=0), checkpoint=checkpoint, config=options,
        progress=False, **given,
    )  # fmt: skip
    record = session.run()
    values = [one.get_value() for one in session.model.params]
    return SimpleNamespace(record=record, values=values, model=session.model)


def equal(one, other):
    return all(map(np.array_equal, one.values, other.values))


class Ignored:
    """A recorder that records only the costs."""

    def __init__(self):
        self.costs = []

    def start(self):
        pass

    def end(self, mode):
        pass

    def train_error(self, count, cost, error):
        self.costs.append(float(cost))


def build(rank, size, sync_type="avg", **options):
    model = Model({"rank": rank, "size": size, **options})
    model.compile_iter_fns(sync_type)
    return model


def test_one_rank_trains_like_a_plain_loop(fork):
    fork(1)
    session = train(n_epochs=2, dropout=True)
    serial, recorder = build(0, 1, dropout=True), Ignored()
    for epoch in range(2):
        serial.epoch = epoch
        for _ in range(serial.data.n_batch_train):
            serial.train_iter(0, recorder)
        serial.reset_iter("train")
        serial.adjust_hyperp(epoch)
    assert all(np.array_equal(a, b.get_value()) for a, b in zip(session.values, serial.params))
    assert session.record.losses == [recorder.costs] and len(recorder.costs) == 60
    assert session.model.cleaned == 1 and not session.record.stopped


def by_hand(exchange, sync_type="avg", **options):
    """Return the parameters after an epoch of two models in this process, which `exchange` connects."""
    models = [build(rank, 2, sync_type, **options) for rank in range(2)]
    for _ in range(models[0].data.n_batch_train):
        for model in models:
            model.train_iter(0, Ignored())
        exchange(models)
    return [[one.get_value() for one in model.params] for model in models]


def test_bsp_averages_the_parameters_of_two_ranks_after_each_batch(two):
    def average(models):
        for both in zip(*(model.params for model in models)):
            mean = sum(one.get_value() for one in both) / 2
            for one in both:
                one.set_value(mean)

    expected = by_hand(average)[0]
    found = train(n_epochs=1)
    for value, by_us in zip(found.values, expected):
        np.testing.assert_allclose(value, by_us, rtol=1e-12)


@pytest.mark.parametrize("descends", [True, False], ids=["model-descends", "session-descends"])
def test_cdd_takes_steps_by_the_sum_of_the_velocities(two, descends):
    def add_up(models):
        for velocities in zip(*(model.vels for model in models)):
            total = sum(one.get_value() for one in velocities)
            for model in models:
                place = model.vels.index(velocities[models.index(model)])
                parameter = model.params[place]
                parameter.set_value(parameter.get_value() + total)

    options = {"n_epochs": 1, "rate": 0.1}
    expected = by_hand(add_up, "cdd", descends=False, **options)[0]
    found = train(sync_type="cdd", descends=descends, **options)
    for value, by_us in zip(found.values, expected):
        np.testing.assert_allclose(value, by_us, rtol=1e-12)


def test_ranks_with_seeds_of_their_own_begin_with_the_masters_parameters(two):
    assert equal(train(own_seeds=True), train(own_seeds=False))


@pytest.mark.parametrize(
    "rule, options",
    [
        ("BSP", {}),
        ("BSP", {"sync_type": "cdd", "rate": 0.1}),
        ("EASGD", {}),
        ("GOSGD", {}),
        (rules.GoSGD(0.5), {}),
        (rules.EASGD(0.5, 2, momentum=0.3), {"rate": 0.05}),
        (rules.LocalSGD(4), {}),
        (rules.DiLoCo(5, outer_momentum=0.5), {}),
        (rules.Downpour(2, 3), {"rate": 0.1}),
        (rules.SSP(1), {"rate": 0.1}),
        (rules.Rule(), {}),
    ],
    ids=str,
)
def test_every_rule_trains(two, rule, options):
    record = train(rule, n_epochs=3, **options).record
    errors = [one["error"] for one in record.validations]
    assert len(errors) == 3 and errors[-1] < 0.2
    first, *_, last = np.split(np.array(record.outputs["error"]), 3, axis=1)
    assert last.mean() < 0.5 * first.mean()
    assert [len(one) for one in record.losses] == [45, 45]
    assert all(one["rank"] is None and one["error_top5"] <= one["error"] for one in record.validations)


def test_an_asynchronous_rule_trains_on_shards_of_different_lengths(two):
    with pytest.raises(ERRORS, match=r"n_batch_train: expected the same number .* got \[6, 5\]"):
        train(batch_size=110)
    for rule in (rules.SSP(0), rules.GoSGD(1.0)):
        record = train(rule, batch_size=110, rate=0.1).record
        assert [len(one) for one in record.losses] == [18, 15]
        assert record.validations[-1]["error"] < 0.5


def test_the_validation_is_weighted_by_the_batches_of_each_rank(two):
    found = train("LocalSGD", batch_size=24, n_epochs=1)  # 17 batches, so 9 and 8
    model = build(0, 1, batch_size=24)
    for one, value in zip(model.params, found.values):
        one.set_value(value)
    outputs = [model.val_fn(*batch) for batch in model.data.batches["val"]]
    assert len(outputs) == 17
    (point,) = found.record.validations
    assert point["loss"] == pytest.approx(np.mean([one[0] for one in outputs]), rel=1e-9)
    assert point["error"] == pytest.approx(np.mean([one[1] for one in outputs]))


def test_linear_scaling_and_warmup_change_the_rate_before_each_batch(two):
    options = {"scale_lr": True, "warmup": 2, "n_epochs": 4, "rate": 0.1, "batch_size": 120}
    for model in (Model, WithScale):
        rates = train(model=model, **options).model.seen
        targets = np.repeat(0.2 * 0.9 ** np.arange(4), 5)
        steps = np.minimum(np.arange(20), 10) / 10
        np.testing.assert_allclose(rates, targets * (0.5 + 0.5 * steps))
    record = train(**options).record
    np.testing.assert_allclose(record.learning_rates, [rates, rates])
    np.testing.assert_allclose(train(n_epochs=2, rate=0.1).model.seen, [0.1] * 15 + [0.09] * 15)


def test_one_sentence_lists_all_that_a_model_lacks_before_anything_is_compiled(two):
    with pytest.raises(ERRORS) as caught:
        train(model=Empty)
    message = str(caught.value)
    for words in (
        "before anything is compiled",
        "compile_iter_fns(first, second) cannot be called as compile_iter_fns() or (sync_type=...)",
        "train_iter(count) cannot be called as train_iter(count, recorder)",
        "val_iter(count, recorder) is missing",
        "reset_iter(mode) is missing",
        "adjust_hyperp(epoch) is missing",
        "params is [3] instead of a list of shared variables",
        "n_epochs is -1 instead of a whole number of at least 0",
        "epoch is missing",
        "data.n_batch_val is missing",
        "data.shard_data(rank) cannot be called as shard_data(mode, rank, size)",
        "shared_lr is missing",
    ):
        assert words in message, words
    assert "cleanup" not in message and "n_subb" not in message and "n_batch_train" not in message


def test_a_model_may_make_its_data_and_its_rate_when_it_compiles(two):
    assert len(train(model=Late, n_epochs=1).record.losses[0]) == 15

    class TooLate(Model):
        def compile_iter_fns(self, sync_type):
            super().compile_iter_fns(sync_type)
            del self.shared_lr

    with pytest.raises(ERRORS, match=r"after compile_iter_fns\(\): shared_lr is missing"):
        train(model=TooLate)


@pytest.mark.parametrize("rule", ["EASGD", "GOSGD", rules.LocalSGD(2), rules.BSP(average="params")])
def test_rules_that_do_not_exchange_velocities_are_refused(rule):
    with pytest.raises(ValueError, match="no other rule exchanges .* nothing would be trained"):
        Session(Model, rule, sync_type="cdd")


def test_combinations_that_would_train_nothing_are_refused(two):
    with pytest.raises(ERRORS, match="has made descent_vel.* nothing would be trained"):
        train("EASGD", always_cdd=True)
    with pytest.raises(ERRORS, match="after 3 batches all of model.params are as before"):
        train("EASGD", frozen=True)
    with pytest.raises(ERRORS, match="after 3 batches all of model.params are as before"):
        train(sync_type="cdd", frozen=True)

    class WithoutVelocities(Model):
        def compile_iter_fns(self):
            super().compile_iter_fns("avg")

    with pytest.raises(ERRORS, match="missing or wrong in WithoutVelocities: vels2, descent_vel"):
        train(sync_type="cdd", model=WithoutVelocities)
    with pytest.raises(ERRORS, match="the velocities of batches without an exchange would be lost"):
        Session(Model, rules.BSP(2), sync_type="cdd")
    with pytest.raises(ERRORS, match="velocities are added up, which scales"):
        Session(Model, sync_type="cdd", scale_lr=True)
    with pytest.raises(ERRORS, match=r"use BSP\(average='params'\), or sync_type='cdd'"):
        Session(Model, rules.BSP())


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"model": 3}, TypeError, "expected a class"),
        ({"model": "models.modelfile"}, ValueError, "expected a module and a class"),
        ({"model": "json:Nothing"}, ValueError, "expected a class 'Nothing'"),
        ({"rule": "SGD"}, ValueError, "expected one of ASGD, BSP"),
        ({"rule": 3}, TypeError, "expected a Rule"),
        ({"devices": []}, TypeError, "expected names"),
        ({"devices": 0}, ValueError, "at least 1"),
        ({"recorder": {}}, TypeError, "expected a Recorder"),
        ({"checkpoint": "/nowhere/file"}, FileNotFoundError, "Session: checkpoint: there is no folder"),
        ({"sync_type": "swap"}, ValueError, "sync_type: expected one of .'avg', 'cdd'"),
        ({"config": 3}, TypeError, "expected a dict"),
        ({"scale_lr": 2}, TypeError, "True or False"),
        ({"warmup": -1}, ValueError, "at least 0"),
        ({"seed": 1.5}, TypeError, "expected an int"),
    ],
)
def test_wrong_arguments_are_refused_in_words(given, error, words):
    with pytest.raises(error, match=words):
        Session(**{"model": Model, **given})


def test_a_model_that_records_nothing_and_a_loss_that_is_no_number_are_errors(two):
    with pytest.raises(ERRORS, match=r"Silent.train_iter\(\) calls recorder.train_error"):
        train(model=Silent)
    with pytest.raises(ERRORS, match="Session: the loss is nan at step 4"):
        train(nan=4)
    with pytest.raises(ERRORS, match="expected as many as there are processes, 2, got 3"):
        train(devices=3)
    assert train(n_epochs=1).record.validations  # the processes can be used


@pytest.mark.parametrize(
    "rule, options",
    [
        ("BSP", {"dropout": True}),
        ("BSP", {"sync_type": "cdd", "rate": 0.1}),
        (rules.LocalSGD(7), {"scale_lr": True, "warmup": 3}),
        (rules.DiLoCo(7), {}),
    ],
    ids=str,
)
def test_a_resumed_session_equals_one_without_a_stop_bit_for_bit(two, tmp_path, rule, options):
    path = tmp_path / "session.npz"
    whole = train(rule, n_epochs=3, **options)
    train(rule, checkpoint=path, n_epochs=1, **options)
    resumed = train(rule, checkpoint=path, n_epochs=3, **options)
    assert equal(whole, resumed)
    assert resumed.record.losses == whole.record.losses
    assert resumed.record.learning_rates == whole.record.learning_rates
    names = ("epoch", "step", "loss", "error", "error_top5")
    points = [
        [[one[name] for name in names] for one in each.record.validations] for each in (whole, resumed)
    ]
    assert points[0] == points[1] and len(points[0]) == 3
    seconds = resumed.record.seconds[0]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("rule", ["EASGD", rules.GoSGD(0.5), rules.Downpour(3, 2), "SSP"], ids=str)
def test_asynchronous_rules_continue_too(two, tmp_path, rule):
    path = tmp_path / "session.npz"
    options = {"checkpoint": path, "rate": 0.1}
    first = train(rule, n_epochs=2, **options).record.validations
    record = train(rule, n_epochs=4, **options).record
    assert record.validations[:2] == first and [len(one) for one in record.losses] == [60, 60]
    assert record.validations[-1]["error"] < 0.2


def test_a_checkpoint_of_another_session_is_refused(two, tmp_path):
    path = str(tmp_path / "session.npz")
    train(n_epochs=1, checkpoint=path)
    former = os.stat(path).st_mtime_ns
    with pytest.raises(ERRORS, match="rule was 'BSP', is 'EASGD'"):
        train("EASGD", checkpoint=path)

    class Larger(Model):
        def __init__(self, config):
            super().__init__(config)
            self.params[1].set_value(np.zeros(11))

    Larger.__name__ = "Model"
    with pytest.raises(ERRORS, match=r"the variable b is float64\[10\] in it, and float64\[11\]"):
        train(model=Larger, checkpoint=path)
    synk.save(path)
    with pytest.raises(ERRORS, match="is not a checkpoint|expected the format"):
        train(checkpoint=path)
    synk.spmd(lambda rank: rank.save(path, {"x": 1}))
    with pytest.raises(ERRORS, match="expected a file of a session"):
        train(checkpoint=path)
    assert former


def test_generators_and_changed_attributes_of_a_model_are_restored(two, tmp_path):
    path = tmp_path / "session.npz"

    class Drawing(Model):
        def __init__(self, config):
            super().__init__(config)
            self.generator, self.rounds = np.random.RandomState(self.rank), []
            self.data.modern = np.random.default_rng(self.rank)

        def get_state(self):
            return {"place": np.arange(3) + self.epoch}

        def set_state(self, state):
            self.placed = state["place"].tolist()

        def adjust_hyperp(self, epoch):
            super().adjust_hyperp(epoch)
            draws = self.generator.rand(), self.data.modern.random(), np.random.rand()
            self.rounds.append([float(one) for one in draws])

    np.random.seed(3)
    whole = train("LocalSGD", model=Drawing, n_epochs=3).model
    np.random.seed(3)
    train("LocalSGD", model=Drawing, checkpoint=path, n_epochs=1)
    resumed = train("LocalSGD", model=Drawing, checkpoint=path, n_epochs=3).model
    assert whole.rounds == resumed.rounds and len(whole.rounds) == 3
    assert resumed.placed == [0, 1, 2]


def test_after_the_death_of_a_rank_a_session_continues_from_its_checkpoint(fork, tmp_path):
    fork(2)
    whole = train("LocalSGD", n_epochs=3)
    options = {"checkpoint": tmp_path / "session.npz", "die": (1, 20), "died": str(tmp_path / "died")}
    with pytest.raises(synk.WorldBrokenError):
        train("LocalSGD", n_epochs=3, **options)
    synk.close()
    fork(2)
    resumed = train("LocalSGD", n_epochs=3, **options)
    assert equal(whole, resumed) and resumed.record.losses == whole.record.losses


@own_process
def test_the_first_interrupt_ends_the_session_and_leaves_the_checkpoint(tmp_path):
    synk.fork(2, use_gpu=False)
    with default_mode("FAST_COMPILE"):
        whole = train("LocalSGD", n_epochs=3)
        for rule in ("LocalSGD", "EASGD"):
            path = tmp_path / rule
            record = train(rule, n_epochs=3, checkpoint=path, interrupt=20).record
            assert record.stopped and record.interrupted and len(record.validations) == 1
            assert len(record.losses[0]) in range(20, 23)
            resumed = train(rule, n_epochs=3, checkpoint=path)
            assert not resumed.record.stopped and len(resumed.record.losses[0]) == 45
            assert rule == "EASGD" or equal(whole, resumed)
    synk.close()


@own_process
def test_a_session_forks_and_closes_by_itself():
    with default_mode("FAST_COMPILE"):
        for devices in (2, ["cpu", "cpu"]):
            found = train("EASGD", model="session_models:Model", devices=devices, n_epochs=1)
            assert len(found.record.losses) == 2 and not synk.is_forked()


@own_process
def test_the_examples_print_what_they_show():
    drawing = [compare] if find_spec("matplotlib") is not None else []
    for one in (Session, Recorder, *drawing):
        assert run_examples(inspect.getdoc(one), one.__name__)


def test_lines_are_printed_as_by_theano_mpi(two, capfd):
    record = train(recorder=Recorder(print_every=5), n_epochs=1).record
    lines = capfd.readouterr().out.splitlines()
    first = np.mean(record.losses[0][:5]), np.mean(record.outputs["error"][0][:5])
    assert lines[:2] == ["", "5 {:f} {:f}".format(*first)]
    assert lines[2].startswith("time per 5 batches: ") and " (train " in lines[2]
    point = record.validations[0]
    assert lines[-4:] == [
        "",
        f"validation cost:{point['loss']:.4f}",
        f"validation error:{point['error']:.4f}",
        f"validation top_5_error:{point['error_top5']:.4f}",
    ]
    assert len(lines) == 3 * 3 + 4, "the master prints, and no other rank"
