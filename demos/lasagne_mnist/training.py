"""The loop over epochs, which knows nothing of processes.

A script hands ``train`` two functions of its own:

``train_epoch(order)``
    a generator that takes one step a minibatch, in the given order of the training rows, and
    yields ``(loss, rows)`` after each step;
``evaluate(part)``
    the loss and the accuracy on ``"valid"`` or ``"test"``.
"""

import math
import sys
import time
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

MOMENTUM = 0.9
ROWS_A_SLICE = 1000  # evaluated at a time: the activations of more would fill the memory


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
