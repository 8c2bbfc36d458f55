"""The options that both scripts have, and their defaults."""

import argparse
import math

from errors import UserError

MOMENTUM = 0.9
RATE = 0.1 / 256  # the learning rate of the paper, per image of a minibatch
DEFAULTS = {"steps": 100, "batch_a_process": 8, "valid": 64, "evaluate_every": 20}
SMALL = {"steps": 4, "batch_a_process": 4, "valid": 8, "evaluate_every": 4}


def parser(description):
    """Return a parser with the options that both scripts have."""
    options = argparse.ArgumentParser(description=description.splitlines()[0])
    options.add_argument(
        "--small",
        action="store_true",
        help="the full network and image size, but only {steps} steps of {batch_a_process} images per "
        "process: a few minutes on two cores".format(**SMALL),
    )
    options.add_argument(
        "--data", metavar="DIR", help="image files, in one folder per class (default: noise)"
    )
    options.add_argument("--steps", type=int, help="default: {steps}".format(**DEFAULTS))
    options.add_argument(
        "--batch",
        type=int,
        metavar="IMAGES",
        help="of all processes together; default: {batch_a_process} per process".format(**DEFAULTS),
    )
    options.add_argument(
        "--slices",
        type=int,
        default=1,
        help="number of slices of a gradient, for minibatches larger than the memory",
    )
    options.add_argument("--learning-rate", type=float, help="default: 0.1 for 256 images")
    options.add_argument("--valid", type=int, metavar="IMAGES", help="images to hold out")
    options.add_argument("--evaluate-every", type=int, metavar="STEPS")
    options.add_argument("--seed", type=int, default=1, help="seed of weights, noise and shuffling")
    network = options.add_argument_group("the network (default: ResNet-50 for ImageNet)")
    network.add_argument("--size", type=int, default=224, help="height and width of an image in pixels")
    network.add_argument("--classes", type=int, default=1000, help="with --data: those of DIR")
    network.add_argument("--blocks", type=int, nargs="+", default=[3, 4, 6, 3], help="per stage")
    network.add_argument("--width", type=int, default=64, help="filters in the first stage")
    return options


def complete(options, processes):
    """Fill in the defaults that depend on other options, and refuse what cannot work."""
    defaults = SMALL if options.small else DEFAULTS
    for name in ("steps", "valid", "evaluate_every"):
        if getattr(options, name) is None:
            setattr(options, name, defaults[name])
    options.processes = processes
    options.batch = options.batch or defaults["batch_a_process"] * processes
    options.learning_rate = options.learning_rate or RATE * options.batch
    for name in ("steps", "batch", "slices", "valid", "evaluate_every"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}: expected 1 or more")
    # The side of the last feature maps, which determines how many numbers per channel batch norm has.
    side = math.ceil(options.size / 2 ** (len(options.blocks) + 1))
    fewest = max(1, options.batch // processes // options.slices)
    if side * side * fewest < 2:
        raise UserError(
            f"--batch: {options.batch} images leave batch norm a single number a channel to "
            f"normalise; give each process and slice two images, or larger ones"
        )
