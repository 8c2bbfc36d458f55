"""Train a residual network with 50 layers with plain Theano, in one process: the starting point.

Usage: python train_resnet_theano.py --small
"""

import math
import time

import command_line
import numpy as np
import script
import theano
from images import Minibatches, load_images
from network import build_model, lasagne
from training import describe, print_table, train


def build_step(model, options):
    """Return the function that takes a step."""
    updates = lasagne.updates.nesterov_momentum(
        model.loss, model.params, options.learning_rate, command_line.MOMENTUM
    )
    updates.update(model.average_updates)
    return theano.function([model.x, model.y], model.loss, updates=updates)


def build(model, options):
    """Return the functions that take a step and that evaluate."""
    compiling = script.Compiling(2)
    with compiling("the training step"):
        train_minibatch = build_step(model, options)
    with compiling("the evaluation"):
        measure = theano.function([model.x, model.y], [model.valid_loss, model.accuracy])

    def evaluate(x, y):
        slices = np.array_split(np.arange(len(y)), math.ceil(len(y) / options.batch))
        results = [measure(x[rows], y[rows]) for rows in slices]
        return np.average(results, axis=0, weights=[len(rows) for rows in slices])

    return train_minibatch, evaluate


def main(arguments=None):
    options = command_line.parser(__doc__).parse_args(arguments)
    command_line.complete(options, processes=1)
    if options.slices > 1:
        raise script.UserError("--slices: needs train_resnet.py --processes 1, not plain Theano")
    images = load_images(options)
    minibatches = Minibatches(images, options)
    start = time.perf_counter()
    model = build_model(options, images)
    describe(model, images, options)
    step, evaluate = build(model, options)
    print(f"Ready:   in {time.perf_counter() - start:.0f} s\n", flush=True)
    seconds, losses = train(minibatches, minibatches.valid, step, evaluate, options)
    print_table([("1 process of plain Theano", seconds, options.batch, losses[-1])])
    return model, losses


if __name__ == "__main__":
    script.run(main)
