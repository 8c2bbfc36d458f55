"""The models of the row ``seeds``: networks of the zoo and an LSTM, on noise.

A model is compiled once, in a process from which the contestants are forked, as the large networks take
a minute to compile.
"""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run seeds.py.")

from types import SimpleNamespace
from typing import NamedTuple, Optional, Tuple

import numpy as np

CLASSES = 1000
WORDS, LENGTH, LSTM_BATCH = 10_000, 100, 16  # as in Platoon's example, which has 128 cells, too
RATE = 1e-5  # noise is not learned; the loss stays finite

_kept = None


class Network(NamedTuple):
    """A network of Theano-MPI's table, as it is trained here.

    Attributes
    ----------
    model : str
        The class in the zoo.
    batch, pixels, width : number
        Images of a rank in a step, their height and width, and the share of the filters.
    there : str
        The name in the table, with the batch.
    seconds : tuple of float or None
        There, for 5120 images: on 1 GPU; on 2 GPUs to train, and to exchange.
    """

    model: str
    batch: int
    pixels: int
    width: float
    there: str
    seconds: Optional[Tuple[float, float, float]]


NETWORKS = {
    "AlexNet": Network("AlexNet", 16, 131, 0.5, "AlexNet-128b", (20.50, 10.35, 0.78)),
    "GoogLeNet": Network("GoogLeNet", 8, 96, 0.5, "GoogLeNet-32b", (63.89, 31.40, 1.00)),
    "VGG16": Network("VGG16", 8, 48, 0.5, "VGG16-32b", (343.37, 169.12, 7.14)),
    "ResNet-50": Network("ResNet50", 8, 64, 0.5, "ResNet50-64b", (163.15, 80.09, 0.81)),
    "ResNet-152": Network("ResNet152", 4, 64, 0.25, "", None),
}


class Minibatch:
    """One minibatch, which every iteration uses, in place of a model's data."""

    n_batch_train, n_batch_val = 1, 0

    def __init__(self, rows, labels):
        self._batch = rows, labels

    def shuffle(self, epoch):
        pass

    def train_batch(self, number):
        return self._batch


def network(name):
    """Return a model of `NETWORKS`, which is not compiled."""
    from synkhronos.extensions import zoo

    model, batch, pixels, width, *_ = NETWORKS[name]
    random = np.random.RandomState(0)
    images = random.standard_normal((batch, 3, pixels, pixels)).astype("float32")
    scale = {"channels": 3, "pixels": pixels, "mean": np.zeros(3), "deviation": np.ones(3)}
    options = {"batch_size": batch, "pixels": pixels, "width": width}
    return _on(getattr(zoo, model), images, CLASSES, scale, options)


def lstm():
    """Return the LSTM for reviews, which is not compiled."""
    from synkhronos.extensions import zoo

    words = np.random.RandomState(0).randint(1, WORDS, (LSTM_BATCH, LENGTH)).astype("int32")
    return _on(zoo.LSTM, words, 2, {"n_words": WORDS}, {"batch_size": LSTM_BATCH})


def _on(make, values, classes, of_data, options):
    """Return a model whose data is one minibatch."""
    from synkhronos.extensions import zoo

    labels = np.random.RandomState(1).randint(0, classes, len(values)).astype("int32")
    rows = SimpleNamespace(labels=labels, load=lambda numbers, pixels: values[numbers])
    data = zoo.data.DataSet("noise", rows, rows, classes, **of_data)
    model = make({"data": data, "learning_rate": RATE, "n_epochs": 1, **options})
    model.data = Minibatch(*model.data.train_batch(0))
    return model


def keep(model):
    """Compile a model. `kept` returns it in this process, and in all that are forked from it."""
    global _kept
    model.compile_iter_fns(function=_compile)
    model.compile_iter_fns, model.cleanup = _do_nothing, _do_nothing
    _kept = model


def _compile(inputs, outputs, name, **options):
    """Compile a function, except that for validation, which is not measured."""
    import theano

    return theano.function(inputs, outputs, name=name, **options) if name == "train" else None


def _do_nothing(sync_type="avg"):
    pass


def kept(config):
    """Return the model of this process, for as many iterations as ``config["batches"]``."""
    _kept.data.n_batch_train = config["batches"]
    _kept.reset_iter("train")
    return _kept
