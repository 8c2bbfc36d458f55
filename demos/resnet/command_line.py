"""The options that both scripts have, and their defaults."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run train_resnet.py.")

import math
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
import script
from script import UserError, positive, whole

script.need("lasagne", "PIL", "tqdm")

MOMENTUM = 0.9
RATE = 0.1 / 256  # the learning rate of the paper, per image of a minibatch
DEFAULTS = {"steps": 100, "batch_a_process": 8, "valid": 64, "evaluate_every": 20}
SMALL = {"steps": 4, "batch_a_process": 4, "valid": 8, "evaluate_every": 4}


def parser(description):
    """Return a parser with the options that both scripts have."""
    options = script.parser(description)
    options.add_argument(
        "--small",
        action="store_true",
        help="the full network and image size, but only {steps} steps of {batch_a_process} images per "
        "process: a few minutes on two cores".format(**SMALL),
    )
    options.add_argument(
        "--data",
        type=script.folder,
        metavar="DIR",
        help="image files, in one folder per class (default: noise)",
    )
    steps = "default: {steps}".format(**DEFAULTS)
    options.add_argument("--steps", type=whole(), metavar="N", help=steps)
    options.add_argument(
        "--batch",
        type=whole(1, 100_000),
        metavar="IMAGES",
        help="of all processes together; default: {batch_a_process} per process".format(**DEFAULTS),
    )
    options.add_argument(
        "--slices",
        type=whole(1, 100_000),
        metavar="N",
        default=1,
        help="number of slices of a gradient, for minibatches larger than the memory (default: 1)",
    )
    options.add_argument(
        "--sync-batch-norm",
        action="store_true",
        help="normalise by the mean and the variance of the whole minibatch (with --slices: of a slice "
        "of each process), instead of the rows of each process",
    )
    options.add_argument(
        "--learning-rate", type=positive(), metavar="RATE", help="default: 0.1 for 256 images"
    )
    options.add_argument("--valid", type=whole(), metavar="IMAGES", help="images to hold out")
    options.add_argument("--evaluate-every", type=whole(), metavar="STEPS")
    options.add_argument(
        "--seed",
        type=whole(0, 2**32 - 1),
        metavar="N",
        default=1,
        help="seed of weights, noise and shuffling (default: 1)",
    )
    network = options.add_argument_group("the network (default: ResNet-50 for ImageNet)")
    for name, number, default, what in (
        ("size", whole(4, 4096), 224, "height and width of an image in pixels"),
        ("classes", whole(2, 1_000_000), 1000, "with --data: the classes of DIR"),
        ("width", whole(1, 4096), 64, "filters in the first stage"),
    ):
        network.add_argument(f"--{name}", type=number, metavar="N", default=default, help=what)
    network.add_argument(
        "--blocks", type=whole(1, 1000), metavar="N", nargs="+", default=[3, 4, 6, 3], help="per stage"
    )
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
    # The side of the last feature maps, which determines how many numbers per channel batch norm has.
    side = math.ceil(options.size / 2 ** (len(options.blocks) + 1))
    together = 1 if options.sync_batch_norm else processes
    fewest = max(1, options.batch // together // options.slices)
    if side * side * fewest < 2:
        raise UserError(
            f"--batch: {options.batch} images leave batch norm a single number a channel to "
            f"normalise; give each process and slice two images, or larger ones"
        )
