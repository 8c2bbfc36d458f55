"""Tests of sessions that go on when a rank dies, and on machines that are threads of one process."""

import threading

import numpy as np
import pytest
from checks.machines import ThreadedMachines
from compilers import default_mode

pytest.importorskip("sklearn")

from session_models import Model

import synkhronos as synk
from synkhronos.extensions import rules
from synkhronos.extensions.session import Recorder, Session

_TURN = threading.Lock()


class WithCallLock(Model):
    """A model whose rank may be a thread: one of them compiles at a time."""

    def __init__(self, config):
        with _TURN:
            super().__init__(config)

    def compile_iter_fns(self, sync_type="avg"):
        with _TURN:
            super().compile_iter_fns(sync_type)


class Telling(Model):
    """A model that tells when the session calls `print_info`."""

    def print_info(self, recorder):
        print("after epoch", self.epoch, recorder.get_latest_val_info()[0])


@pytest.fixture(autouse=True)
def in_python():
    with default_mode("FAST_COMPILE"):
        yield


@pytest.fixture
def fork_machines(world_of, monkeypatch):
    """Function that opens a world of machines with so many ranks, all of them threads."""

    def fork(*sizes):
        def make(machines, by_machine, master_rank, timeout, profile_workers):
            return ThreadedMachines(sizes, master_rank, timeout)

        with monkeypatch.context() as patch:
            patch.setattr("synkhronos.world.launch._make_transport", make)
            world_of(sum(sizes), timeout=60)

    return fork


def train(rule, model=WithCallLock, checkpoint=None, sync_type="avg", on_death="raise", **options):
    session = Session(
        model, rule, None, Recorder(print_every=0), checkpoint, sync_type=sync_type, seed=1,
        on_death=on_death, config=options, progress=False,
    )  # fmt: skip
    record = session.run()
    return record, [one.get_value() for one in session.model.params]


@pytest.mark.parametrize("rule, options", [("BSP", {}), ("BSP", {"sync_type": "cdd", "rate": 0.1})])
def test_ranks_on_two_machines_train_as_on_one(two, fork_machines, tmp_path, rule, options):
    record, expected = train(rule, n_epochs=2, **options)
    fork_machines(1, 1)
    train(rule, checkpoint=tmp_path / "session.npz", n_epochs=1, **options)
    again, found = train(rule, checkpoint=tmp_path / "session.npz", n_epochs=2, **options)
    assert all(map(np.array_equal, found, expected)) and again.losses == record.losses
    assert [one["loss"] for one in again.validations] == [one["loss"] for one in record.validations]


@pytest.mark.parametrize(
    "rule",
    ["EASGD", *(pytest.param(one, marks=pytest.mark.slow) for one in (rules.GoSGD(0.5), rules.SSP(1)))],
    ids=str,
)
def test_asynchronous_rules_train_on_machines(fork_machines, rule):
    fork_machines(2, 1)
    record, _ = train(rule, n_epochs=4, batch_size=20, rate=0.1)
    assert [len(one) for one in record.losses] == [80] * 3
    assert record.validations[-1]["error"] < 0.3


@pytest.mark.parametrize("rule", ["EASGD", rules.GoSGD(0.5), "SSP"], ids=str)
def test_the_others_go_on_when_a_rank_dies_and_a_new_one_takes_its_place(world_of, tmp_path, rule):
    world_of(2, timeout=60)
    died = str(tmp_path / "died")
    options = {"die": (1, 20), "died": died, "n_epochs": 4, "rate": 0.1}
    record, _ = train(rule, Model, on_death="continue", **options)
    assert (tmp_path / "died").exists() and not record.stopped
    # The new rank repeats the second epoch of 15 batches, and its record begins there.
    assert [len(one) for one in record.losses] == [60, 45]
    assert [one["epoch"] for one in record.validations] == [1, 2, 3, 4]
    assert record.validations[-1]["error"] < 0.2 and "batches" not in record.validations[0]
    assert synk.spmd(lambda rank: rank.rank) == [0, 1], "the processes can be used"


def test_what_needs_all_ranks_cannot_go_on_without_one(tmp_path):
    saved = tmp_path / "session.npz"
    for rule, checkpoint, advice in (
        ("BSP", None, "use a rule without them"),
        ("LocalSGD", None, "use a rule without them"),
        ("EASGD", saved, "leave out checkpoint="),
    ):
        with pytest.raises(ValueError, match=f"in collectives, which .* uses; {advice}"):
            Session(Model, rule, checkpoint=checkpoint, on_death="continue")
    with pytest.raises(ValueError, match="expected one of .'continue', 'raise'., got 'ignore'"):
        Session(Model, "EASGD", on_death="ignore")


def test_the_master_prints_its_own_information_after_each_validation(world_of, capfd):
    world_of(2, timeout=60)
    train("EASGD", Telling, n_epochs=2)
    assert capfd.readouterr().out.splitlines() == ["after epoch 0 15", "after epoch 1 30"]
