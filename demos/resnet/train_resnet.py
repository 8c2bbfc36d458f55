"""Train a residual network with 50 layers on all cores.

    python train_resnet.py --small --compare
    python train_resnet.py --data DIR --batch 64 --slices 4

A step equals the step of one process on the whole minibatch, except for batch norm: the rows of a rank,
or of each of its slices, are normalized by their own mean and variance, not by the minibatch's. Each
rank or slice therefore needs enough rows for good statistics. With ``--sync-batch-norm`` the mean and
the variance are computed over all ranks, and batch norm, too, equals a step of one process.

The running averages of these means and variances are not communicated at each step either: each rank
averages over its own rows. Before an evaluation they are averaged over the ranks, weighted by the number
of rows of each rank, so that all ranks evaluate the same network and continue the training with it.
"""

import math
import sys
import time

import command_line
import comparison
import script
import synkhronos as synk
import train_resnet_theano
from images import Minibatches, load_images
from network import build_model
from synkhronos.extensions.train import make_train_function
from synkhronos.extensions.updates import nesterov_momentum
from training import describe, print_table, timed_step, train

COMPARED_STEPS = 3


def build(model, options, compiling=None):
    """Return the functions that take a step and that evaluate."""
    compiling = compiling or script.Compiling(2)

    def update_rule(loss, params, *args):
        """Nesterov momentum; the running averages are updated together with the gradient."""
        gradient, *rest = nesterov_momentum(loss, params, *args)
        return [*gradient, *model.average_updates], *rest

    rule = update_rule, options.learning_rate, command_line.MOMENTUM
    with compiling("the training step"):
        train_minibatch = make_train_function(model.loss, model.params, model.x, model.y, *rule)
    with compiling("the evaluation"):
        measure = synk.function([model.x, model.y], [model.valid_loss, model.accuracy])
    synk.distribute()
    rows_by_rank = shares(options.batch, options.processes)
    rows_a_slice = math.ceil(max(rows_by_rank) / options.slices)

    def step(rows, labels):
        return train_minibatch(rows, labels, num_slices=options.slices)

    def evaluate(rows, labels):
        if not options.sync_batch_norm:  # otherwise they are equal
            synk.all_reduce(model.averages, weights=rows_by_rank)
        rows_a_rank = math.ceil(len(labels) / options.processes)
        return measure(rows, labels, num_slices=math.ceil(rows_a_rank / rows_a_slice))

    return step, evaluate


def shares(rows, n):
    """Return how many rows each rank gets: as evenly as possible, with the longer shares first."""
    return [rows // n + (rank < rows % n) for rank in range(n)]


def alone(kind, processes, *arguments):
    """Return a function that takes a step, in this process alone."""
    options = parser().parse_args(arguments)
    command_line.complete(options, int(processes))
    options.processes, options.sync_batch_norm = 1, False
    images = load_images(options)
    minibatches, model = Minibatches(images, options), build_model(options, images)
    if kind == comparison.THEANO:
        step = train_resnet_theano.build_step(model, options)
    else:
        step, _ = build(model, options)
    return lambda: timed_step(minibatches, step)


def parser():
    """Return the parser of this script."""
    made = command_line.parser(__doc__)
    script.add_processes(made)
    made.add_argument("--compare", action="store_true", help="also time one process")
    return made


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    # With the statistics of each rank, the first step differs from one process on purpose.
    verify = None if options.sync_batch_norm else "off"
    n = script.fork(options.processes, devices=options.devices, verify=verify)
    command_line.complete(options, n)
    images = load_images(options)
    minibatches = Minibatches(images, options)
    start = time.perf_counter()
    model = build_model(options, images)
    describe(model, images, options)
    statistics = (
        "batch norm uses the statistics of all ranks"
        if options.sync_batch_norm
        else f"batch norm uses the statistics of each rank, and its {len(model.averages)} running "
        f"averages are\n         averaged over the ranks before each evaluation"
    )
    print(
        f"Ranks:   {n}, with {max(shares(options.batch, n))} images each at most; every rank loads "
        f"its own images;\n         {statistics}"
    )
    is_compared = options.compare and n > 1
    compiling = script.Compiling(4 if is_compared else 2)
    step, evaluate = build(model, options, compiling)
    print(f"Ready:   in {time.perf_counter() - start:.0f} s\n", flush=True)
    seconds, losses = train(minibatches, minibatches.valid, step, evaluate, options)
    print_table([(f"{n} process(es)", seconds, options.batch, losses[-1])])
    if is_compared:
        times = comparison.compare(
            __file__,
            [n, *arguments],
            lambda: timed_step(minibatches, step),
            COMPARED_STEPS,
            compiling,
            options.devices,
        )
        print("", *comparison.describe(times, n, f"{options.batch} images"), sep="\n")
    synk.close()
    return model, losses


if __name__ == "__main__":
    script.run(main)
