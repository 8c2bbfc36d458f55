"""Train Lasagne's MNIST networks with plain Theano, in one process: the starting point.

    python train_mnist_theano.py --model cnn --plot curve.png

The two parallel scripts differ from this one only in where the digits are and how a step is taken.
"""

import command_line
import network
import script
import training
import numpy as np
import theano


def build_step(model, options):
    """Return the function that trains on a minibatch."""
    loss = model.losses.mean()
    updates = network.lasagne.updates.nesterov_momentum(
        loss, model.params, options.learning_rate, training.MOMENTUM
    )
    return theano.function([model.x, model.y], loss, updates=updates)


def build(digits, options):
    """Return the functions that train for an epoch and that evaluate."""
    model, compiling = network.build_model(options), script.Compiling(2)
    with compiling("the training step"):
        train_minibatch = build_step(model, options)
    with compiling("the evaluation"):
        measure = theano.function([model.x, model.y], [model.valid_loss, model.accuracy])

    def train_epoch(order):
        images, labels = digits.parts["train"]
        for batch in training.batches(len(order), options.batch_size):
            rows = order[batch]
            yield train_minibatch(images[rows], labels[rows]), len(rows)

    def evaluate(part):
        images, labels = digits.parts[part]
        slices = training.batches(len(labels), training.ROWS_A_SLICE)
        results = [measure(images[rows], labels[rows]) for rows in slices]
        return np.average(results, axis=0, weights=[rows.stop - rows.start for rows in slices])

    return train_epoch, evaluate


def main(arguments=None):
    options = command_line.parser(__doc__).parse_args(arguments)
    digits = command_line.prepare(options)
    train_epoch, evaluate = build(digits, options)
    history = training.train(train_epoch, evaluate, digits, options)
    return history, command_line.report(history, evaluate, digits, options)


if __name__ == "__main__":
    script.run(main)
