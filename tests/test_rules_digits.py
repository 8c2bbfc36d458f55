"""Each training rule trains the network of the MNIST demo to recognize 97% of the test digits."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import theano

for needed in ("lasagne", "sklearn", "tqdm"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"the demos need {needed}", allow_module_level=True)

import synkhronos as synk
from synkhronos.extensions import rules, updates

DEMO = Path(__file__).resolve().parent.parent / "demos" / "lasagne_mnist"
MODULES = ("mnist", "network", "command_line", "script")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:lasagne")]


@pytest.fixture(scope="module")
def demo():
    """The modules of the demo. They set ``floatX``, which is restored afterwards."""
    float_x = theano.config.floatX
    sys.path.insert(0, str(DEMO))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(DEMO))
        theano.config.floatX = float_x
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module", params=[2, 4], ids=["2-ranks", "4-ranks"])
def network(request, demo, open_world):
    """A step of the network, what evaluates it, and the values at the start."""
    open_world(request.param)
    options = demo.command_line.parser("test").parse_args(["--no-dropout", "--seed", "1"])
    model, rate = demo.network.build_model(options), theano.shared(np.float32(0), "rate")
    step = rules.make_step(
        model.losses.mean(), model.params, [model.x, model.y], updates.adam, learning_rate=rate
    )
    evaluate = synk.function([model.x, model.y], model.accuracy)
    synk.distribute()
    return SimpleNamespace(
        step=step,
        rate=rate,
        params=model.params,
        evaluate=evaluate,
        values=[(one, one.get_value()) for one in step.update.get_shared()],
        parts=demo.mnist.load_digits("sklearn").parts,
    )


EPOCHS, BATCH_SIZE = 9, 8
RULES = {
    "BSP": (rules.BSP(), 0.002),
    "LocalSGD": (rules.LocalSGD(5), 0.002),
    "DiLoCo": (rules.DiLoCo(5, outer_momentum=0.5), 0.001),
    "EASGD": (rules.EASGD(0.3, 2), 0.002),
    "EAMSGD": (rules.EASGD(0.3, 2, momentum=0.5), 0.001),
    "Downpour": (rules.Downpour(), 0.001),  # which is ASGD
    "SSP": (rules.SSP(), 0.001),
    "GoSGD": (rules.GoSGD(0.3), 0.002),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_trains_the_digits(network, name):
    rule, rate = RULES[name]
    synk.broadcast(*map(list, zip(*network.values)))
    synk.broadcast(network.rate, np.float32(rate))
    train, test = network.parts["train"], network.parts["test"]

    def slow_down(rank, rule, step, loss):
        """Take smaller steps towards the end."""
        if step == steps * 2 // 3:
            network.rate.set_value(np.float32(rate / 8))

    steps = EPOCHS * synk.Rank.n_minibatches(len(train[0]), synk.size(), BATCH_SIZE)
    options = {"seed": 1, "report": slow_down, "progress": False}
    rules.train(network.step, network.params, train, rule, BATCH_SIZE, EPOCHS, **options)
    assert network.evaluate(*test) >= 0.97
