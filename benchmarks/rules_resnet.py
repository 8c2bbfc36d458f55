"""rules_resnet: how fast a residual network learns by each training rule, and what the exchanges cost.

The residual network of the zoo, with one bottleneck in each of its four stages and half of the width,
on scikit-learn's digits, two ranks. It has two million parameters, 8 MB. Batch norm uses the statistics
of the rows that are computed, in the validation as well, so that the network has nothing but parameters.
"""

import common
import rules
from common import ONE_THREAD, Contestant

import numpy as np

BLOCKS, WIDTH, SIZE = (1, 1, 1, 1), 32, 28
LEARNING_RATE, PLAIN_RATE = 0.01, 0.05


def main():
    common.main(__doc__, measure, draw)


def network():
    """Return the parts of the network by name, and the digits with three equal colors."""
    import lasagne
    import theano
    import theano.tensor as T
    from synkhronos.extensions import zoo

    theano.config.floatX = "float32"
    lasagne.random.set_rng(np.random.RandomState(1))
    x, y = T.tensor4("x"), T.ivector("y")
    built, _ = zoo.resnet(SIZE, 10, WIDTH / 64, input=x, blocks=BLOCKS)
    prediction = lasagne.layers.get_output(built)
    loss = lasagne.objectives.categorical_crossentropy(prediction, y).mean()
    return {
        "loss": loss,
        "params": lasagne.layers.get_all_params(built, trainable=True),
        "inputs": [x, y],
        "measured": {"loss": loss, "accuracy": T.eq(prediction.argmax(axis=1), y).mean(dtype="float32")},
        "data": {
            part: (np.repeat(images, 3, axis=1), labels)
            for part, (images, labels) in rules.digits().items()
        },
        "rates": (LEARNING_RATE, PLAIN_RATE),
    }


def measure(options):
    rounds = 1 if options.quick else 7
    lines, extra = [], {}
    with common.contestants(
        one=Contestant(rules.world, 1, network, environment=ONE_THREAD),
        two=Contestant(rules.world, rules.RANKS, network, environment=ONE_THREAD),
    ) as players:
        extra["curves"] = rules.measure_learning(players["two"], min(rounds, 2), lines)
        rules.measure_cost("ResNet", players, 2.0 if options.quick else 3.0, rounds, lines)
    notes = [
        f"the network: {len(BLOCKS)} stages of one bottleneck, {WIDTH} filters in the first, images of "
        f"{SIZE} x {SIZE} pixels, 2.0 million parameters",
        *rules.notes_on_training(LEARNING_RATE, PLAIN_RATE),
        "the learning rates were chosen by the loss on the validation digits",
    ]
    return common.Result("training rules, a residual network on the digits", lines, notes, extra)


def draw(figure, record):
    figure.set_size_inches(13, 4.2)
    by_time, by_rows, cost = figure.subplots(1, 3)
    rules.draw_learning(by_time, by_rows, record)
    rules.draw_cost(cost, record, "ResNet", {})


if __name__ == "__main__":
    main()
