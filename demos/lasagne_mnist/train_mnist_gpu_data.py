"""Train Lasagne's MNIST networks on all GPUs (or cores), with the digits in shared variables.

    python train_mnist_gpu_data.py --processes 2 --plot curve.png

For each epoch the training digits are scattered again: every rank holds its share in its own shared
variables, on a GPU in the memory of the GPU. A minibatch is then a slice of them, without a copy.
"""

import math

import command_line
import network
import script
import training
import numpy as np
import synkhronos as synk
import theano
from synkhronos.extensions.updates import nesterov_momentum


def build(digits, options):
    """Return the functions that train for an epoch and that evaluate."""
    model = network.build_model(options)
    loss = model.losses.mean()
    grad_updates, param_updates, gradient = nesterov_momentum(
        loss, model.params, options.learning_rate, training.MOMENTUM
    )
    shareds = {
        part: [theano.shared(array[:0]) for array in arrays] for part, arrays in digits.parts.items()
    }

    def function_of(part, outputs, updates=None):
        return synk.function(
            [],
            outputs,
            updates=updates,
            givens=list(zip([model.x, model.y], shareds[part])),
            sliceable_shareds=shareds[part],
        )

    compiling = script.Compiling(3)
    with compiling("the gradient"):
        compute_gradient = function_of("train", loss, grad_updates)
    with compiling("the update"):
        update_params = synk.function([], updates=param_updates)
    with compiling("the evaluation"):
        measured = [model.valid_loss, model.accuracy]
        measure = {part: function_of(part, measured) for part in ("valid", "test")}
    synk.distribute()
    for part in measure:
        synk.scatter(shareds[part], digits.parts[part])
    train_data = [synk.data(array) for array in digits.parts["train"]]

    def train_epoch(order):
        synk.scatter(shareds["train"], train_data, batch=deal(order, options.processes))
        for batch in training.batches(len(order), options.batch_size):
            with synk.fuse():
                loss = compute_gradient(batch_s=hands(batch, options.processes))
                synk.all_reduce(gradient, weights=compute_gradient)
                update_params()
            yield loss.result(), batch.stop - batch.start

    def evaluate(part):
        rows_a_rank = max(synk.get_lengths(shareds[part][1]))
        return measure[part](num_slices=math.ceil(rows_a_rank / training.ROWS_A_SLICE))

    return train_epoch, evaluate


def deal(order, n):
    """Return the rows in an order in which ``scatter`` deals them like cards, one to each rank in turn.

    Each minibatch, a slice of `order`, is then spread evenly over the ranks.
    """
    return np.concatenate([order[rank::n] for rank in range(n)])


def hands(batch, n):
    """Return, by rank, which of its own rows are in `batch`, a slice of the order.

    Rank ``r`` holds the rows ``r``, ``r + n``, ``r + 2 * n``, ... of the order.
    """
    return [
        slice(math.ceil((batch.start - rank) / n), math.ceil((batch.stop - rank) / n))
        for rank in range(n)
    ]


def main(arguments=None):
    parser = command_line.parser(__doc__)
    script.add_processes(parser)
    options = parser.parse_args(arguments)
    options.processes = script.fork(options.processes, devices=options.devices)
    digits = command_line.prepare(options)
    train_epoch, evaluate = build(digits, options)
    history = training.train(train_epoch, evaluate, digits, options)
    accuracy = command_line.report(history, evaluate, digits, options)
    synk.close()
    return history, accuracy


if __name__ == "__main__":
    script.run(main)
