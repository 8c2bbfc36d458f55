"""The loop over epochs, independent of the number of processes.

A script passes two functions to ``train``:

``train_epoch(order)``
    a generator that takes one step per minibatch, in the given order of the training rows, and
    yields ``(loss, rows)`` after each step;
``evaluate(part)``
    returns the loss and the accuracy on ``"valid"`` or ``"test"``.
"""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run train_mnist_cpu_data.py.")

import math
import sys
import time
from typing import NamedTuple

import numpy as np
from command_line import script
from tqdm import tqdm

MOMENTUM = 0.9
ROWS_A_SLICE = 1000  # evaluated at a time: more activations would not fit into memory


class Epoch(NamedTuple):
    number: int
    train_loss: float
    valid_loss: float
    valid_accuracy: float
    seconds: float  # of training only


def batches(rows, batch_size):
    """Return slices of all rows: at most `batch_size` long, and of nearly equal lengths."""
    bounds = np.linspace(0, rows, math.ceil(rows / batch_size) + 1).astype(int)
    return [slice(start, stop) for start, stop in zip(bounds, bounds[1:])]


def train(train_epoch, evaluate, digits, options):
    """Train, print a table with one line per epoch, and return the list of ``Epoch``."""
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
    """Return the mean loss of one epoch and the seconds that it took."""
    total, start = 0.0, time.perf_counter()
    for step, (loss, rows) in enumerate(train_epoch(order), 1):
        script.check_loss(loss, f"after {step} step(s) of this epoch")
        total += loss * rows
        bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        bar.update(rows)
    return total / len(order), time.perf_counter() - start


def progress_bar(images):
    """Return a progress bar, which is disabled if stderr is a file or a pipe."""
    return tqdm(total=images, unit=" images", leave=False, disable=None)


def write(bar, line):
    bar.write(line)
    sys.stdout.flush()
