"""Train Lasagne's MNIST networks on all cores (or GPUs), with the digits in shared memory.

    python train_mnist_cpu_data.py --processes 2 --plot curve.png

The digits are copied to shared memory once. A minibatch is then a list of row numbers. Every rank reads
its share of these rows from shared memory, and the gradients are averaged over the ranks.
"""

import math
import tempfile
from pathlib import Path

import command_line
import comparison
import network
import script
import training
import numpy as np
import synkhronos as synk
import train_mnist_theano
from synkhronos.extensions.train import make_train_function
from synkhronos.extensions.updates import nesterov_momentum

COMPARED_TURNS = 5
COMPARED_ROWS = 2000  # at most: a whole epoch of MNIST would take too long


def build_step(model, options):
    """Return the function that trains on a minibatch."""
    loss = model.losses.mean()
    rule = nesterov_momentum, options.learning_rate, training.MOMENTUM
    return make_train_function(loss, model.params, model.x, model.y, *rule)


def build(digits, options, compiling=None):
    """Return the functions that train for an epoch and that evaluate."""
    model, compiling = network.build_model(options), compiling or script.Compiling(2)
    with compiling("the training step"):
        train_minibatch = build_step(model, options)
    with compiling("the evaluation"):
        measure = synk.function([model.x, model.y], [model.valid_loss, model.accuracy])
    synk.distribute()
    data = {part: [synk.data(array) for array in arrays] for part, arrays in digits.parts.items()}

    def train_epoch(order):
        images, labels = data["train"]
        for batch in training.batches(len(order), options.batch_size):
            rows = order[batch]
            yield train_minibatch(images, labels, batch=rows), len(rows)

    def evaluate(part):
        images, labels = data[part]
        rows_a_rank = len(labels) / options.processes
        return measure(images, labels, num_slices=math.ceil(rows_a_rank / training.ROWS_A_SLICE))

    return train_epoch, evaluate


def compare(train_epoch, digits, options, compiling):
    """Time epochs of Theano untouched, of one process at its best, and of all processes, in turns."""
    images, labels = digits.parts["train"]
    order = np.random.RandomState(options.seed).permutation(len(labels))[:COMPARED_ROWS]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "digits.npz"
        np.savez(file, images=images[order], labels=labels[order])
        times = comparison.compare(
            __file__,
            [file, *command_line.as_arguments(options)],
            lambda: list(train_epoch(order)),
            COMPARED_TURNS,
            compiling,
            options.devices,
        )
    lines = comparison.describe(times, options.processes, f"{len(order)} digits")
    print("Speed:  " + "\n        ".join(lines))
    return times


def alone(kind, file, *arguments):
    """Return a function that trains for an epoch on the digits of a file, in this process alone."""
    options = command_line.parser(__doc__).parse_args(arguments)
    model = network.build_model(options)
    with np.load(file) as arrays:
        data = images, labels = arrays["images"], arrays["labels"]
    order = np.random.RandomState(options.seed).permutation(len(labels))
    batches = [order[batch] for batch in training.batches(len(order), options.batch_size)]
    if kind == comparison.THEANO:
        step = train_mnist_theano.build_step(model, options)
        return lambda: [step(images[rows], labels[rows]) for rows in batches]
    step = build_step(model, options)
    data = [synk.data(array) for array in data]
    return lambda: [step(*data, batch=rows) for rows in batches]


def main(arguments=None):
    parser = command_line.parser(__doc__)
    script.add_processes(parser)
    parser.add_argument("--compare", action="store_true", default=True, help="(the default)")
    parser.add_argument(
        "--no-compare", dest="compare", action="store_false", help="do not time one process"
    )
    options = parser.parse_args(arguments)
    options.processes = script.fork(options.processes, devices=options.devices)
    digits = command_line.prepare(options)
    is_compared = options.compare and options.processes > 1
    compiling = script.Compiling(4 if is_compared else 2)
    train_epoch, evaluate = build(digits, options, compiling)
    history = training.train(train_epoch, evaluate, digits, options)
    accuracy = command_line.report(history, evaluate, digits, options)
    if is_compared:
        compare(train_epoch, digits, options, compiling)
    synk.close()
    return history, accuracy


if __name__ == "__main__":
    script.run(main)
