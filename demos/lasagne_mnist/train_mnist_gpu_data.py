"""Trains Lasagne's MNIST networks on all GPUs (or cores), the digits in Theano shared variables.

    python train_mnist_gpu_data.py --processes 2 --plot curve.png

For each epoch the training digits are dealt out anew: every rank holds its share in its own shared
variables, on a GPU in the GPU's memory. A minibatch is then a slice of them, and nothing is copied.
"""

import math

import command_line
import network
import training
import numpy as np
import synkhronos as synk
import theano
from synkhronos.extensions.updates import nesterov_momentum


def build(digits, options):
    """The functions that train for an epoch and that evaluate."""
    model = network.build_model(options)
    loss = model.losses.mean()
    grad_updates, param_updates, gradient = nesterov_momentum(
        loss, model.params, options.learning_rate, training.MOMENTUM
    )
    shareds = {
        part: [theano.shared(array[:0]) for array in arrays]
        for part, arrays in digits.parts.items()
    }

    def function_of(part, outputs, updates=None):
        return synk.function(
            [],
            outputs,
            updates=updates,
            givens=list(zip([model.x, model.y], shareds[part])),
            sliceable_shareds=shareds[part],
        )

    compute_gradient = function_of("train", loss, grad_updates)
    update_params = synk.function([], updates=param_updates)
    measure = {
        part: function_of(part, [model.valid_loss, model.accuracy]) for part in ("valid", "test")
    }
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
    """The rows in the order that makes ``scatter`` deal them like cards, one to each rank in turn.

    So each minibatch, a run of rows in `order`, is spread evenly over the ranks.
    """
    return np.concatenate([order[rank::n] for rank in range(n)])


def hands(batch, n):
    """Where each rank has its rows of that slice of the order: rank, rank + n, rank + 2n, ..."""
    return [
        slice(math.ceil((batch.start - rank) / n), math.ceil((batch.stop - rank) / n))
        for rank in range(n)
    ]


def main(arguments=None):
    parser = command_line.parser(__doc__)
    parser.add_argument("--processes", type=int, help="default: one a GPU, or one a core")
    parser.add_argument("--devices", nargs="+", help="Theano's, one a process, such as: cuda0 cuda1")
    options = parser.parse_args(arguments)
    options.processes = synk.fork(options.processes, devices=options.devices)
    digits = command_line.prepare(options)
    train_epoch, evaluate = build(digits, options)
    history = training.train(train_epoch, evaluate, digits, options)
    accuracy = command_line.report(history, evaluate, digits, options)
    synk.close()
    return history, accuracy


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # the workers are ended as the script ends
        raise SystemExit("Interrupted.") from None
