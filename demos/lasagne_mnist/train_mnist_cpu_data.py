"""Train Lasagne's MNIST networks on all cores (or GPUs), with the digits in shared memory.

    python train_mnist_cpu_data.py --processes 2 --plot curve.png

The digits are copied to shared memory once. A minibatch is then a list of row numbers. Every rank reads
its share of these rows from shared memory, and the gradients are averaged over the ranks.
"""

import math

import command_line
import network
import script
import training
import numpy as np
import synkhronos as synk
import train_mnist_theano
from synkhronos.extensions.train import make_train_function
from synkhronos.extensions.updates import nesterov_momentum
from threadpoolctl import threadpool_info

COMPARED_EPOCHS = 7
COMPARED_ROWS = 5000  # at most: a whole epoch of MNIST would take too long


def build(digits, options):
    """Return the functions that train for an epoch and that evaluate."""
    model = network.build_model(options)
    train_minibatch = make_train_function(
        model.losses.mean(),
        model.params,
        model.x,
        model.y,
        nesterov_momentum,
        options.learning_rate,
        training.MOMENTUM,
    )
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


def compare(train_epoch, digits, options):
    """Time epochs of plain Theano in one process, and of all processes, in alternation.

    Every process has the same number of BLAS threads. The speedup may exceed the number of processes,
    because smaller shares of a minibatch fit the caches better.
    """
    epochs = {1: train_mnist_theano.build(digits, options)[0], options.processes: train_epoch}
    order = np.random.permutation(len(digits.parts["train"][1]))[:COMPARED_ROWS]
    seconds = {processes: [] for processes in epochs}
    with training.progress_bar(2 * (1 + COMPARED_EPOCHS) * len(order)) as bar:
        for _ in range(1 + COMPARED_EPOCHS):
            for processes, epoch in epochs.items():
                bar.set_description(f"comparing, processes: {processes}", refresh=False)
                seconds[processes].append(training.run_epoch(epoch, order, bar)[1])
    # The first epoch of each is a warm-up.
    alone, together = (np.median(taken[1:]) for taken in seconds.values())
    pools = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    print(
        f"Speed:  {options.processes} processes are {alone / together:.2f} times as fast as one of "
        f"plain Theano: {together:.3f} s per epoch, {alone:.3f} s\n"
        f"        (medians of {COMPARED_EPOCHS} epochs of {len(order)} digits each, in turns; "
        f"BLAS threads per process: {max(pools, default=1)})"
    )
    return alone / together


def main(arguments=None):
    parser = command_line.parser(__doc__)
    script.add_processes(parser)
    parser.add_argument("--compare", action="store_true", default=True, help="(the default)")
    parser.add_argument(
        "--no-compare", dest="compare", action="store_false", help="do not time plain Theano"
    )
    options = parser.parse_args(arguments)
    options.processes = script.fork(options.processes, devices=options.devices)
    digits = command_line.prepare(options)
    train_epoch, evaluate = build(digits, options)
    history = training.train(train_epoch, evaluate, digits, options)
    accuracy = command_line.report(history, evaluate, digits, options)
    if options.compare and options.processes > 1:
        compare(train_epoch, digits, options)
    synk.close()
    return history, accuracy


if __name__ == "__main__":
    script.run(main)
