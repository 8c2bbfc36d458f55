"""scikit-learn's small digits as the data of a session, and what the models here have in common."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run train.py.")

import numpy as np
from sklearn.datasets import load_digits

TRAIN, VALID = 1400, 397  # pictures


class Digits:
    """Batches of digits, shuffled and divided among the ranks.

    ``n_batch_train`` and ``n_batch_val`` are this rank's numbers of batches.
    """

    def __init__(self, batch_size):
        digits = load_digits()
        x, y = (digits.data / 16).astype("float32"), digits.target.astype("int32")
        self._batches = {"train": [], "val": []}
        for mode, first, length in (("train", 0, TRAIN), ("val", TRAIN, VALID)):
            for start in range(first, first + length - batch_size + 1, batch_size):
                rows = slice(start, start + batch_size)
                self._batches[mode].append((x[rows], y[rows]))
        self._order = {mode: list(range(len(one))) for mode, one in self._batches.items()}
        self.shards = dict(self._batches)

    def shuffle_data(self, mode, common_seed):
        """Change the order of the batches, in the same way on every rank."""
        random = np.random.RandomState(common_seed)
        self._order[mode] = random.permutation(len(self._batches[mode])).tolist()

    def shard_data(self, mode, rank, size):
        """Keep every `size`-th batch; ranks that average have to have equal numbers of them."""
        mine = self._order[mode][rank::size]
        if mode == "train":
            mine = mine[: len(self._order[mode]) // size]
        self.shards[mode] = [self._batches[mode][one] for one in mine]

    @property
    def n_batch_train(self):
        return len(self.shards["train"])

    @property
    def n_batch_val(self):
        return len(self.shards["val"])


class DigitsModel:
    """The part of a model that does not depend on how its functions are built.

    A derived class sets ``params`` and ``shared_lr``. Its ``compile_iter_fns`` makes ``train_fn`` and
    ``val_fn``, which return the cost and the error, and the latter also the error among the best five.
    """

    n_subb, epoch = 1, 0

    def __init__(self, config):
        self.rank, self.size = config["rank"], config["size"]
        self.n_epochs, self.batch_size = config.get("n_epochs", 10), config.get("batch_size", 20)
        self.seed = config.get("seed", 0)
        self.data = Digits(self.batch_size)
        for mode in ("train", "val"):
            self.data.shard_data(mode, self.rank, self.size)
        self.position = {"train": 0, "val": 0}

    def next_batch(self, mode):
        batch = self.data.shards[mode][self.position[mode]]
        self.position[mode] += 1
        return batch

    def train_iter(self, count, recorder):
        recorder.start()
        if self.position["train"] == 0:
            self.data.shuffle_data("train", common_seed=self.seed + self.epoch)
            self.data.shard_data("train", self.rank, self.size)
        x, y = self.next_batch("train")
        recorder.end("load")
        recorder.start()
        cost, error = self.train_fn(x, y)
        recorder.end("calc")
        recorder.train_error(count, cost, error)

    def val_iter(self, count, recorder):
        recorder.val_error(count, *self.val_fn(*self.next_batch("val")))

    def reset_iter(self, mode):
        self.position[mode] = 0

    def adjust_hyperp(self, epoch):
        """Divide the learning rate by four after two thirds of the epochs."""
        if epoch + 1 == 2 * self.n_epochs // 3:
            self.shared_lr.set_value(np.float32(self.shared_lr.get_value() / 4))

    def cleanup(self):
        pass
