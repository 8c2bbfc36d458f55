"""What the three training scripts share: the digits, the two networks, the loop, the report.

Nothing here knows of processes. A script hands ``train`` two functions of its own:

``train_epoch(order)``
    a generator that takes one step a minibatch, in the given order of the training rows, and
    yields ``(loss, rows)`` after each step;
``evaluate(part)``
    the loss and the accuracy on ``"valid"`` or ``"test"``.
"""

import argparse
import gzip
import hashlib
import http.client
import math
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import synkhronos  # noqa: F401  (before Theano: with it, Theano imports on today's NumPy)
import numpy as np
import theano
import theano.tensor as T
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parent.parent))
from lasagne_on_theano import lasagne

theano.config.floatX = "float32"

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_FILES = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
MNIST_FOLDER = Path(__file__).resolve().parent / "data"
SPLIT_SEED = 2017  # not --seed: every run is judged on the same test digits
MOMENTUM = 0.9
ROWS_A_SLICE = 1000  # evaluated at a time: the activations of more would fill the memory


# The digits


class Digits(NamedTuple):
    """Three parts, ``"train"``, ``"valid"`` and ``"test"``, each ``(images, labels)``.

    Images are (rows, 1, 28, 28) and lie in [0, 1].
    """

    source: str
    parts: dict
    epochs: int  # enough for these


def load_digits(data=None):
    """MNIST from the folder ``data``, the default folder or the net; else scikit-learn's digits.

    ``data="sklearn"`` asks for scikit-learn's small set.
    """
    if data == "sklearn":
        return load_sklearn_digits()
    if data is not None:
        return load_mnist(Path(data))
    try:
        return load_mnist(MNIST_FOLDER)
    except FileNotFoundError:
        pass
    if download_mnist(MNIST_FOLDER):
        return load_mnist(MNIST_FOLDER)
    return load_sklearn_digits("; no MNIST files here, and none could be downloaded")


def load_mnist(folder):
    images, labels, test_images, test_labels = (
        read_idx(find_idx(folder, name)) for name in MNIST_FILES
    )
    train, valid = stratified_split(labels, 1 / 6)
    parts = {
        "train": as_arrays(images[train], labels[train], white=255),
        "valid": as_arrays(images[valid], labels[valid], white=255),
        "test": as_arrays(test_images, test_labels, white=255),
    }
    return Digits(f"MNIST, from {folder}", parts, epochs=5)


def load_sklearn_digits(why=""):
    from scipy.ndimage import zoom
    from sklearn.datasets import load_digits as load_8x8

    small, labels = load_8x8(return_X_y=True)
    # As in MNIST: a digit of 20x20 in the middle of a frame of 28x28.
    images = zoom(small.reshape(-1, 8, 8), (1, 2.5, 2.5), order=1)
    images = np.pad(images, ((0, 0), (4, 4), (4, 4)))
    rest, test = stratified_split(labels, 0.2)
    train, valid = (rest[part] for part in stratified_split(labels[rest], 0.125))
    rows = {"train": train, "valid": valid, "test": test}
    return Digits(
        f"scikit-learn's {len(labels)} digits of 8x8 pixels, scaled to 28x28{why}",
        {part: as_arrays(images[rows[part]], labels[rows[part]], white=16) for part in rows},
        epochs=100,
    )


def stratified_split(labels, fraction):
    """Rows in two parts, the second with that fraction of each digit; always the same parts."""
    rng = np.random.RandomState(SPLIT_SEED)
    chosen = np.zeros(len(labels), bool)
    for digit in range(10):
        rows = rng.permutation(np.flatnonzero(labels == digit))
        chosen[rows[: round(fraction * len(rows))]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def as_arrays(images, labels, white):
    images = images.reshape(-1, 1, 28, 28).astype(theano.config.floatX) / white
    return images, labels.astype("int32")


def find_idx(folder, name):
    for path in (folder / f"{name}.gz", folder / name):
        if path.exists():
            return path
    raise FileNotFoundError(f"expected {name} or {name}.gz in {folder}")


def read_idx(path):
    """One array of bytes in MNIST's own format, compressed or not."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        content = file.read()
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of bytes: it starts with {content[:3]!r}")
    axes = content[3]
    shape = np.frombuffer(content, ">i4", count=axes, offset=4)
    return np.frombuffer(content, "uint8", offset=4 + 4 * axes).reshape(shape)


def download_mnist(folder, timeout=3):
    """Whether MNIST now lies in ``folder``; offline that is a plain ``False``."""
    try:
        for name, digest in MNIST_FILES.items():
            with urllib.request.urlopen(f"{MNIST_URL}{name}.gz", timeout=timeout) as answer:
                content = answer.read()
            if hashlib.sha256(content).hexdigest() != digest:
                return False
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = folder / f"{name}.{os.getpid()}"
            unfinished.write_bytes(content)
            unfinished.replace(folder / f"{name}.gz")
    except (OSError, http.client.HTTPException):
        return False
    return True


# The networks


class Model(NamedTuple):
    x: T.TensorVariable
    y: T.TensorVariable
    params: list
    losses: T.TensorVariable  # of each training row, with dropout
    valid_loss: T.TensorVariable
    accuracy: T.TensorVariable


def build_model(options):
    """The network of Lasagne's MNIST tutorial, its graph and its parameters.

    One seed gives one set of initial weights, with and without dropout.
    """
    lasagne.random.set_rng(np.random.RandomState(options.seed))
    x, y = T.tensor4("x"), T.ivector("y")
    network = NETWORKS[options.model](x, drop=not options.no_dropout)
    cross_entropy = lasagne.objectives.categorical_crossentropy
    prediction = lasagne.layers.get_output(network, deterministic=True)
    return Model(
        x=x,
        y=y,
        params=lasagne.layers.get_all_params(network, trainable=True),
        losses=cross_entropy(lasagne.layers.get_output(network), y),
        valid_loss=cross_entropy(prediction, y).mean(),
        accuracy=T.eq(prediction.argmax(axis=1), y).mean(dtype=theano.config.floatX),
    )


def build_mlp(x, drop):
    """Two hidden layers of 800 units."""
    layers = lasagne.layers
    layer = layers.InputLayer((None, 1, 28, 28), x)
    layer = layers.DropoutLayer(layer, 0.2 * drop)
    for _ in range(2):
        layer = layers.DenseLayer(layer, 800, nonlinearity=lasagne.nonlinearities.rectify)
        layer = layers.DropoutLayer(layer, 0.5 * drop)
    return layers.DenseLayer(layer, 10, nonlinearity=lasagne.nonlinearities.softmax)


def build_cnn(x, drop):
    """Twice a convolution of 32 filters of 5x5 and pooling of 2x2; a hidden layer of 256 units."""
    layers, rectify = lasagne.layers, lasagne.nonlinearities.rectify
    layer = layers.InputLayer((None, 1, 28, 28), x)
    for _ in range(2):
        layer = layers.Conv2DLayer(layer, 32, (5, 5), nonlinearity=rectify)
        layer = layers.MaxPool2DLayer(layer, (2, 2))
    layer = layers.DenseLayer(layers.DropoutLayer(layer, 0.5 * drop), 256, nonlinearity=rectify)
    layer = layers.DropoutLayer(layer, 0.5 * drop)
    return layers.DenseLayer(layer, 10, nonlinearity=lasagne.nonlinearities.softmax)


NETWORKS = {"cnn": build_cnn, "mlp": build_mlp}


# The loop


class Epoch(NamedTuple):
    number: int
    train_loss: float
    valid_loss: float
    valid_accuracy: float
    seconds: float  # of training alone


def batches(rows, batch_size):
    """Slices over all rows, at most ``batch_size`` long, none a row longer than the shortest."""
    bounds = np.linspace(0, rows, math.ceil(rows / batch_size) + 1).astype(int)
    return [slice(start, stop) for start, stop in zip(bounds, bounds[1:])]


def train(train_epoch, evaluate, digits, options):
    """Trains, prints a table that grows by a line an epoch, and returns the list of ``Epoch``."""
    rows = len(digits.parts["train"][1])
    shuffle = np.random.RandomState(options.seed)
    history = []
    with progress_bar(options.epochs * rows) as bar:
        write(bar, "epoch  train loss  valid loss  valid accuracy  seconds")
        for number in range(1, options.epochs + 1):
            bar.set_description(f"epoch {number}/{options.epochs}", refresh=False)
            loss, seconds = run_epoch(train_epoch, shuffle.permutation(rows), bar)
            valid_loss, accuracy = evaluate("valid")
            history.append(Epoch(number, loss, float(valid_loss), float(accuracy), seconds))
            write(bar, "{:5d}  {:10.4f}  {:10.4f}  {:14.2%}  {:7.2f}".format(*history[-1]))
    return history


def run_epoch(train_epoch, order, bar):
    """The mean loss of one epoch and the seconds it took."""
    total, start = 0.0, time.perf_counter()
    for loss, rows in train_epoch(order):
        total += loss * rows
        bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        bar.update(rows)
    return total / len(order), time.perf_counter() - start


def progress_bar(images):
    """A bar with the loss and the rate; none where stderr is a file or a pipe."""
    return tqdm(total=images, unit=" images", leave=False, disable=None)


def write(bar, line):
    bar.write(line)
    sys.stdout.flush()


# What goes in and what comes out


def parser(description):
    """The options that all scripts have."""
    options = argparse.ArgumentParser(description=description.splitlines()[0])
    options.add_argument("--model", choices=sorted(NETWORKS), default="cnn")
    options.add_argument(
        "--data",
        metavar="DIR",
        help="folder with MNIST's files, or 'sklearn' for scikit-learn's small digits (default: "
        "the folder data beside this script, else a download to it, else 'sklearn')",
    )
    options.add_argument("--epochs", type=int, help="default: 100, on MNIST 5")
    options.add_argument("--batch-size", type=int, default=200)
    options.add_argument("--learning-rate", type=float, default=0.05)
    options.add_argument("--seed", type=int, default=1, help="of weights, dropout and shuffling")
    options.add_argument("--no-dropout", action="store_true")
    options.add_argument("--plot", metavar="FILE", help="draw the learning curve")
    return options


def prepare(options):
    """Loads the digits that the options ask for, and says what will be done."""
    digits = load_digits(options.data)
    options.epochs = options.epochs or digits.epochs
    sizes = {part: len(labels) for part, (_, labels) in digits.parts.items()}
    print(f"Digits: {digits.source}")
    print("        {train} to train, {valid} to validate, {test} to test".format(**sizes))
    dropout = "no dropout" if options.no_dropout else "dropout"
    print(
        f"Model:  {options.model}, {dropout}, batches of {options.batch_size}, "
        f"learning rate {options.learning_rate}, seed {options.seed}"
    )
    return digits


def report(history, evaluate, digits, options):
    """Prints the result on the test digits and draws the curve; returns the test accuracy."""
    loss, accuracy = evaluate("test")
    seconds = np.median([epoch.seconds for epoch in history])
    rate = len(digits.parts["train"][1]) / seconds
    print(f"Test:   loss {loss:.4f}, accuracy {accuracy:.2%}")
    print(f"Time:   {seconds:.3f} s an epoch (median), {rate:.0f} images/s")
    if options.plot:
        plot(history, accuracy, options)
    return float(accuracy)


def plot(history, test_accuracy, options):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    losses, accuracies = figure.subplots(1, 2)
    numbers = [epoch.number for epoch in history]
    training = "training" if options.no_dropout else "training, with dropout"
    losses.semilogy(numbers, [epoch.train_loss for epoch in history], label=training)
    losses.semilogy(numbers, [epoch.valid_loss for epoch in history], label="validation")
    losses.set(xlabel="epoch", ylabel="cross-entropy")
    losses.legend()
    accuracies.plot(numbers, [100 * epoch.valid_accuracy for epoch in history], color="C1")
    accuracies.set(xlabel="epoch", ylabel="validation accuracy (%)")
    figure.suptitle(f"{options.model}: {test_accuracy:.2%} of the test digits recognised")
    figure.savefig(options.plot, dpi=120)
    print(f"Plot:   {options.plot}")
