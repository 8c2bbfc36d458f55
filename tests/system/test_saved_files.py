"""Files that earlier versions have saved: training continues from them, and records are read.

``python test_saved_files.py`` writes the files in ``saved`` anew; those there are of the version before
the training of rules and of sessions had one loop.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from compilers import compiler, default_mode, tt

import synkhronos as synk
from synkhronos.extensions import rules, updates
from synkhronos.extensions.session import Recorder, Session

SAVED = Path(__file__).with_name("saved")
ROWS = np.random.RandomState(0).normal(3, 1, (40, 2))
RULES = {"bsp": rules.BSP(3), "easgd": rules.EASGD(0.3, 2, 0.5)}


class Model:
    """A session's model: the mean of the rows of its rank, in an order of its own in each epoch."""

    batch_size, n_subb, epoch = 2, 1, 0

    def __init__(self, config):
        self.n_epochs, self.rank = config["n_epochs"], config["rank"]
        self.data = type("Data", (), {"n_batch_train": 10, "n_batch_val": 1})()
        self.w = compiler.shared(np.zeros(2), "w")
        self.params, self.shared_lr = [self.w], compiler.shared(0.1, "rate")
        self.random, self.taken = np.random.RandomState(config["rank"]), 0

    def compile_iter_fns(self):
        x = tt.dmatrix("x")
        cost = tt.sqr(x - self.w).mean()
        new = [(self.w, self.w - self.shared_lr * compiler.grad(cost, self.w))]
        new = updates.apply_momentum(new, self.params, 0.5)
        self.train = compiler.function([x], cost, updates=new)
        self.validate = compiler.function([x], cost)

    def train_iter(self, count, recorder):
        rows = ROWS[self.random.randint(len(ROWS), size=2)]
        recorder.train_error(count, self.train(rows), 0.5)
        self.taken += 1

    def val_iter(self, count, recorder):
        recorder.val_error(count, self.validate(ROWS))

    def reset_iter(self, mode):
        pass

    def adjust_hyperp(self, epoch):
        self.shared_lr.set_value(self.shared_lr.get_value() * 0.9)

    def cleanup(self):
        pass


def train_by_rule(name, path, epochs):
    """Return the record and the parameters of a training; both ranks have the same in the end."""
    w, x = compiler.shared(np.zeros(2), "w"), tt.dmatrix("x")
    loss = tt.sqr(x - w).sum(axis=1).mean()
    step = rules.make_step(loss, [w], [x], updates.adam, learning_rate=0.1)
    if name != "bsp":
        new = updates.apply_momentum([(w, w - 0.1 * compiler.grad(loss, w))], [w], 0.5)
        step = synk.function([x], loss, updates=new, name="step")
    validate = synk.function([x], {"loss": loss})
    options = {"validate": (validate, [ROWS]), "validate_by": "all", "progress": False}
    record = rules.train(step, [w], [ROWS], RULES[name], 4, epochs, checkpoint=path, seed=5, **options)
    return record, w.get_value()


def train_session(path, epochs):
    config = {"n_epochs": epochs}
    session = Session(
        Model, "LocalSGD", None, Recorder(print_every=0), path, config=config, seed=5, progress=False
    )
    return session.run(), session.model.w.get_value(), session.model.taken


@pytest.fixture
def world(open_world):
    open_world(2, timeout=60)
    with default_mode("FAST_COMPILE"):
        yield


def copied(name, tmp_path):
    return shutil.copy(SAVED / name, tmp_path / name)


def assert_same(whole, resumed):
    """Compare two trainings. The machine that has saved the files may round in another way."""
    np.testing.assert_allclose(resumed[0].losses, whole[0].losses, rtol=1e-9)
    np.testing.assert_allclose(resumed[1], whole[1], rtol=1e-9)


@pytest.mark.parametrize("name", RULES)
def test_training_with_a_rule_continues(world, tmp_path, name):
    resumed, values = train_by_rule(name, copied(f"{name}.npz", tmp_path), 4)
    earlier = rules.Record.load(SAVED / f"{name}.json")
    assert [one[:10] for one in resumed.losses] == earlier.losses
    assert resumed.validations[:2] == earlier.validations
    if name == "bsp":
        assert_same(train_by_rule(name, None, 4), (resumed, values))
    assert [len(one) for one in resumed.losses] == [20, 20]


def test_a_session_continues(world, tmp_path):
    resumed, values, taken = train_session(copied("session.npz", tmp_path), 4)
    assert_same(train_session(None, 4), (resumed, values))
    assert taken == 40
    earlier = Recorder.load(SAVED / "session.json")
    assert resumed.validations[:2] == earlier.validations
    assert [one[:20] for one in resumed.outputs["error"]] == earlier.outputs["error"] == [[0.5] * 20] * 2


if __name__ == "__main__":
    synk.fork(2, use_gpu=False)
    with default_mode("FAST_COMPILE"):
        SAVED.mkdir(exist_ok=True)
        for name in RULES:
            path = SAVED / f"{name}.npz"
            train_by_rule(name, path, 2)[0].save(path.with_suffix(".json"))
        train_session(SAVED / "session.npz", 2)[0].save(SAVED / "session.json")
    synk.close()
    sys.exit()
