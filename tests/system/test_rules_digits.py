"""The training rules train the network of the MNIST demo to recognize 97% of the test digits."""

from types import SimpleNamespace

import numpy as np
import pytest
import theano
from demo_modules import modules_of, need

import synkhronos as synk
from synkhronos.extensions import rules, updates

need("lasagne", "sklearn", "tqdm")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:lasagne")]
demo = modules_of("lasagne_mnist", "mnist", "network", "command_line", "script")


@pytest.fixture(scope="module", params=[2, 4], ids=["2-ranks", "4-ranks"])
def network(request, demo, open_world):
    """A step of the network, what evaluates it, and the values at the start."""
    open_world(request.param)
    options = demo.command_line.parser("test").parse_args(["--no-dropout", "--seed", "1"])
    model, rate = demo.network.build_model(options), theano.shared(np.float32(0), "rate")
    step = rules.make_step(
        model.losses.mean(), model.params, [model.x, model.y], updates.adam, learning_rate=rate
    )
    measured = {"loss": model.valid_loss, "accuracy": model.accuracy}
    evaluate = synk.function([model.x, model.y], measured)
    synk.distribute()
    return SimpleNamespace(
        step=step,
        rate=rate,
        params=model.params,
        evaluate=evaluate,
        values=[(one, one.get_value()) for one in step.update.get_shared()],
        parts=demo.mnist.load_digits("sklearn").parts,
    )


EPOCHS, BATCH_SIZE = 15, 8
#: The rate of each rule was chosen from 0.001, 0.002 and 0.004, and 0.008 if 0.004 was the best of
#: these: it has the smallest loss on the validation digits after training on the training digits, summed
#: over both numbers of ranks. It was chosen with 9 epochs, and for LocalSGD again with 15. For
#: Downpour and GoSGD, whose runs differ, it has the smallest mean loss of at least four runs. The test
#: digits were not used for it.
RULES = {
    "BSP": (rules.BSP(), 0.008),
    "LocalSGD": (rules.LocalSGD(5), 0.008),
    "DiLoCo": (rules.DiLoCo(5, outer_momentum=0.5), 0.002),
    "EASGD": (rules.EASGD(0.3, 2), 0.008),
    "EAMSGD": (rules.EASGD(0.3, 2, momentum=0.5), 0.002),
    "Downpour": (rules.Downpour(), 0.001),  # which is ASGD
    "SSP": (rules.SSP(), 0.002),
    "GoSGD": (rules.GoSGD(0.3), 0.002),
}
REPEATABLE = ("BSP", "LocalSGD", "DiLoCo")


def train(network, data, rule, rate):
    """Train from the start, with smaller steps towards the end."""
    synk.broadcast(*map(list, zip(*network.values)))
    synk.broadcast(network.rate, np.float32(rate))
    steps = EPOCHS * synk.Rank.n_minibatches(len(data[0]), synk.size(), BATCH_SIZE)

    def slow_down(rank, rule, step, loss):
        if step == steps * 2 // 3:
            network.rate.set_value(np.float32(rate / 8))

    options = {"seed": 1, "report": slow_down, "progress": False}
    rules.train(network.step, network.params, data, rule, BATCH_SIZE, EPOCHS, **options)


def test_every_rule_trains_the_digits(network):
    """With the rates that were chosen, they are trained on the validation digits, too.

    No two runs of a rule whose ranks do not wait are the same: the mean of three has to reach 97%.
    """
    data = [np.concatenate(both) for both in zip(network.parts["train"], network.parts["valid"])]
    accuracies = {}
    for name, (rule, rate) in RULES.items():
        accuracies[name] = []
        for _ in range(1 if name in REPEATABLE else 3):
            train(network, data, rule, rate)
            accuracies[name].append(float(network.evaluate(*network.parts["test"])["accuracy"]))
    print(synk.size(), "ranks:", accuracies)
    assert min(map(np.mean, accuracies.values())) >= 0.97, accuracies
