"""step, large: a training step of ResNet-50 on two ranks, 4 images of 224 x 224 pixels each.

Every step all-reduces the flat gradient of 102 MB, applies Nesterov momentum and collects the loss; the
running averages of batch norm stay with the ranks. Against plain Theano as a user starts it, with all 8
images; Theano with one BLAS thread and malloc set as by the library; the library with Theano's own
operations; PyTorch, in one process of two threads and as DDP on two processes; and the ideal: two
processes that know nothing of each other, each with 4 images, at the same time.
"""

import argparse
import functools

import common
import training_steps
from training_steps import RANKS

import numpy as np

EACH = 4  # images a rank
LEARNING_RATE, MOMENTUM = 0.01, 0.9


def main():
    common.main(__doc__, measure, training_steps.draw, add_options)


def add_options(parser):
    parser.add_argument("--pixels", type=int, help="of an image's side; default: 224, with --quick 64")


def network(pixels, sync_batch_norm=False):
    """Return the arguments of ``make_train_function``, ResNet-50's."""
    from synkhronos.extensions import updates

    model, _ = build(pixels, sync_batch_norm)

    def rule(loss, params, *arguments):
        gradient, *rest = updates.nesterov_momentum(loss, params, *arguments)
        return [*gradient, *model.average_updates], *rest

    return model.loss, model.params, model.x, model.y, rule, LEARNING_RATE, MOMENTUM


def plain_network(pixels):
    """Return the inputs, the loss and the updates of a step of plain Theano."""
    model, lasagne = build(pixels)
    rule = lasagne.updates.nesterov_momentum(model.loss, model.params, LEARNING_RATE, MOMENTUM)
    return [model.x, model.y], model.loss, [*rule.items(), *model.average_updates]


def build(pixels, sync_batch_norm=False):
    """Return the demo's model, and Lasagne."""
    demo = common.load_demo("resnet", "network")
    options = argparse.Namespace(
        seed=1,
        size=pixels,
        classes=1000,
        blocks=[3, 4, 6, 3],
        width=64,
        sync_batch_norm=sync_batch_norm,
    )
    return demo.build_model(options), demo.lasagne


def images(pixels):
    """Return noise and labels; what they show does not matter for speed."""
    random = np.random.RandomState(0)
    pictures = random.standard_normal((RANKS * EACH, 3, pixels, pixels)).astype("float32")
    return pictures, random.randint(0, 1000, RANKS * EACH).astype("int32")


def measure(options):
    pixels = options.pixels or (64 if options.quick else 224)
    rounds, each = (2, 1) if options.quick else (5, 2)
    title = f"ResNet-50, {pixels} x {pixels} pixels, {EACH} images a rank"
    ours, plain, load = (functools.partial(one, pixels) for one in (network, plain_network, images))
    torch_network = "ResNet50", LEARNING_RATE, MOMENTUM
    return training_steps.measure(
        title, ours, plain, torch_network, load, RANKS * EACH, "images",
        rounds, each, speed_up=2.2, goals={"torch": 1.2},
    )  # fmt: skip


if __name__ == "__main__":
    main()
