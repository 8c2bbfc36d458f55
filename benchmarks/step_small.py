"""step, small: a training step of Lasagne's MNIST CNN on two ranks.

Every step reads 500 rows, all-reduces the flat gradient, applies Nesterov momentum and collects the
loss. Against plain Theano as a user starts it; Theano with one BLAS thread and malloc set as by the
library; the library with Theano's own operations; PyTorch, in one process of two threads and as DDP on
two processes; and the ideal: two processes that know nothing of each other, each with 250 rows, at the
same time.
"""

import argparse

import common
import training_steps

import numpy as np

BATCH = 500
ROWS = 5000
LEARNING_RATE, MOMENTUM = 0.01, 0.9


def main():
    common.main(__doc__, measure, training_steps.draw)


def network():
    """Return the arguments of ``make_train_function``."""
    from synkhronos.extensions import updates

    model, _ = build()
    rule = updates.nesterov_momentum, LEARNING_RATE, MOMENTUM
    return model.losses.mean(), model.params, model.x, model.y, *rule


def plain_network():
    """Return the inputs, the loss and the updates of a step of plain Theano."""
    model, lasagne = build()
    loss = model.losses.mean()
    rule = lasagne.updates.nesterov_momentum
    return [model.x, model.y], loss, rule(loss, model.params, LEARNING_RATE, MOMENTUM)


def build():
    """Return the demo's model, and Lasagne."""
    demo = common.load_demo("lasagne_mnist", "network")
    options = argparse.Namespace(seed=1, model="cnn", no_dropout=False)
    return demo.build_model(options), demo.lasagne


def digits():
    """Return images and labels; what they show does not matter for speed."""
    random = np.random.RandomState(0)
    images = random.rand(ROWS, 1, 28, 28).astype("float32")
    return images, random.randint(0, 10, ROWS).astype("int32")


def measure(options):
    rounds, each = (4, 2) if options.quick else (15, 8)
    title = f"Lasagne's MNIST CNN, batch {BATCH}"
    torch_network = "MnistCnn", LEARNING_RATE, MOMENTUM
    return training_steps.measure(
        title, network, plain_network, torch_network, digits, BATCH, "rows",
        rounds, each, speed_up=6.5, goals={"ddp": 1.6},
    )  # fmt: skip


if __name__ == "__main__":
    main()
