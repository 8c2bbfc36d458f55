"""A model of Theano-MPI's kind for the small digits of scikit-learn, and its data."""

import os
import signal

import numpy as np
from compilers import RandomStreams, compiler, cross_entropy, softmax, tt
from sklearn.datasets import load_digits

SIZES = {"train": 1200, "val": 400}
DIGITS = load_digits()


class Digits:
    """Batches of digits, shuffled and divided among the ranks as the data of Theano-MPI are."""

    def __init__(self, batch_size):
        x, y = DIGITS.data / 16, DIGITS.target.astype("int32")
        parts = {"train": slice(SIZES["train"]), "val": slice(SIZES["train"], sum(SIZES.values()))}
        self.batches = {
            mode: [
                (x[part][start : start + batch_size], y[part][start : start + batch_size])
                for start in range(0, SIZES[mode], batch_size)
            ]
            for mode, part in parts.items()
        }
        self.order = {mode: list(range(len(self.batches[mode]))) for mode in parts}
        self.shard = dict(self.batches)

    @property
    def n_batch_train(self):
        return len(self.shard["train"])

    @property
    def n_batch_val(self):
        return len(self.shard["val"])

    def shuffle_data(self, mode, common_seed=1234):
        order = np.random.RandomState(common_seed).permutation(len(self.batches[mode]))
        self.order[mode] = order.tolist()

    def shard_data(self, mode, rank, size):
        self.shard[mode] = [self.batches[mode][one] for one in self.order[mode][rank::size]]


class Model:
    """A layer of softmax units, trained with momentum. Options are items of `config`.

    With ``"cdd"`` it computes velocities as Theano-MPI's models do: ``train_iter`` first calls
    ``descent_vel``, unless the option ``"descends"`` is false.
    """

    name = "softmax"

    def __init__(self, config):
        self.config, self.rank, self.size = config, config["rank"], config["size"]
        self.batch_size = config.get("batch_size", 40)
        self.n_epochs, self.n_subb, self.epoch = config.get("n_epochs", 3), config.get("n_subb", 1), 0
        self.data = Digits(self.batch_size)
        for mode in ("train", "val"):
            self.data.shard_data(mode, self.rank, self.size)
        self.current = {"train": 0, "val": 0}
        self.cleaned = 0
        seed = config.get("own_seeds", False) * self.rank
        weights = np.random.RandomState(seed).normal(0, 0.01, (64, 10))
        self.params = [compiler.shared(weights, "W"), compiler.shared(np.zeros(10), "b")]
        self.shared_lr = compiler.shared(np.float64(config.get("rate", 0.2)), "rate")
        self.seen = []

    def compile_iter_fns(self, sync_type="avg"):
        x, y = tt.dmatrix("x"), tt.ivector("y")
        W, b = self.params
        kept = x
        if self.config.get("dropout"):
            draws = RandomStreams(7 + self.rank)
            kept = x * draws.uniform(low=0, high=2, size=x.shape)
        p = softmax(tt.dot(kept, W) + b)
        cost = cross_entropy(p, y).mean()
        error = tt.neq(p.argmax(axis=1), y).mean(dtype="float64")
        self.vels = [compiler.shared(0 * one.get_value()) for one in self.params]
        velocities = [
            (v, 0.5 * v - self.shared_lr * compiler.grad(cost, one))
            for v, one in zip(self.vels, self.params)
        ]
        if sync_type == "cdd" or self.config.get("always_cdd"):
            self.vels2 = [compiler.shared(0 * one.get_value()) for one in self.params]
            new = [(one, one + v) for one, v in zip(self.params, self.vels2)]
            self.descent_vel = compiler.function([], [], updates=new)
            updates = velocities
        else:
            updates = velocities + [(one, one + v) for one, (_, v) in zip(self.params, velocities)]
        if self.config.get("frozen"):
            updates = []
        self.train_fn = compiler.function([x, y], [cost, error], updates=updates)
        clean = softmax(tt.dot(x, W) + b)
        top5 = tt.sum(clean > clean[tt.arange(y.shape[0]), y].dimshuffle(0, "x"), axis=1) >= 5
        outputs = [
            cross_entropy(clean, y).mean(), tt.neq(clean.argmax(axis=1), y).mean(dtype="float64"),
            top5.mean(dtype="float64"),
        ]  # fmt: skip
        self.val_fn = compiler.function([x, y], outputs)

    def take(self, mode):
        """Return the next batch, or the same again for a sub-batch."""
        position = self.current[mode] // self.n_subb
        self.current[mode] += 1
        return self.data.shard[mode][position]

    def train_iter(self, count, recorder):
        if self.current["train"] == 0:
            self.data.shuffle_data(mode="train", common_seed=self.epoch)
            self.data.shard_data(mode="train", rank=self.rank, size=self.size)
        recorder.start()
        batch = self.take("train")
        recorder.end("load")
        if self.config.get("die") == (self.rank, count) and not os.path.exists(self.config["died"]):
            open(self.config["died"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.config.get("interrupt") == count and self.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        recorder.start()
        if hasattr(self, "descent_vel") and self.config.get("descends", True):
            self.descent_vel()
        cost, error = self.train_fn(*batch)
        if self.config.get("nan") == count:
            cost = np.nan
        recorder.train_error(count, cost, error)
        recorder.end("calc")
        self.seen.append(float(self.shared_lr.get_value()))

    def val_iter(self, count, recorder):
        recorder.val_error(count, *self.val_fn(*self.take("val")))

    def reset_iter(self, mode):
        self.current[mode] = 0

    def adjust_hyperp(self, epoch):
        self.shared_lr.set_value(np.float64(self.shared_lr.get_value() * 0.9))

    def cleanup(self):
        self.cleaned += 1


class WithScale(Model):
    """A model that scales its learning rate by itself."""

    def scale_lr(self, size):
        self.shared_lr.set_value(np.float64(self.shared_lr.get_value() * size))


class Silent(Model):
    """A model that records nothing."""

    def train_iter(self, count, recorder):
        self.train_fn(*self.take("train"))


class Late(Model):
    """A model that makes its data and its learning rate when it compiles, as those for Keras do."""

    def __init__(self, config):
        super().__init__(config)
        self.late = self.data, self.shared_lr
        del self.shared_lr
        self.data = type("Empty", (), {})()

    def compile_iter_fns(self, *args, **kwargs):
        assert kwargs == {"sync_type": "avg"}
        self.data, self.shared_lr = self.late
        super().compile_iter_fns()


class Empty:
    """What no session can train."""

    def __init__(self, config):
        self.n_epochs, self.n_subb, self.params = -1, 2, [3]
        self.data = type("Data", (), {"n_batch_train": 5, "shard_data": lambda self, rank: None})()

    def train_iter(self, count):
        raise AssertionError("it is not called")

    def compile_iter_fns(self, first, second):
        raise AssertionError("it is not called")

    def cleanup(self):
        pass
