"""Tests of the zoo: the sizes of the papers' networks, and small models that learn from real data."""

import functools
import importlib.util
import inspect

import numpy as np
import pytest
import theano
import theano.tensor as tt
from demo_modules import need

import synkhronos  # noqa: F401  # before Lasagne

need("lasagne", "PIL", "sklearn", "mlxtend", "foolbox")

import lasagne

from synkhronos.extensions import zoo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lasagne")

#: Compiles with few optimizations, whose code is compiled once for all networks.
compile_fast = functools.partial(theano.function, mode=theano.Mode("cvm", "fast_compile"))


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    monkeypatch.setattr(theano.config, "floatX", "float32")


@pytest.fixture
def zero_weights(monkeypatch):
    """Weights that need not be drawn, for the largest networks."""
    for kind in (lasagne.init.Normal, lasagne.init.Uniform):
        monkeypatch.setattr(kind, "sample", lambda self, shape: np.zeros(shape, "float32"))
    for kind in (lasagne.init.Glorot, lasagne.init.He, lasagne.init.Orthogonal):
        monkeypatch.setattr(kind, "sample", lambda self, shape: np.zeros(shape, "float32"))


def need_keras(monkeypatch, folder):
    """Skip a test without Keras; otherwise set where Keras writes a file."""
    if importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed: python -m synkhronos install keras")
    monkeypatch.setenv("KERAS_HOME", str(folder))
    monkeypatch.setenv("KERAS_BACKEND", "theano")


#: The trainable parameters at full width, with the scale and the shift of batch normalization and
#: without running averages. The papers give rounded numbers; the exact ones are those of the reference
#: implementations named in the docstrings.
PARAMETERS = {
    "alexnet": 60_965_224,  # "60 million"
    "vgg16": 138_357_544,  # "138 million"
    "googlenet": 6_998_552,  # Caffe's bvlc_googlenet without heads
    "resnet50": 25_557_032,  # torchvision's resnet50
    "resnet152": 60_192_808,  # torchvision's resnet152
    "cifar10_cnn": 89_578,  # Caffe's cifar10_full
    "lstm": 1_411_842,  # 10,000 words, 128 cells, 2 classes
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_network_has_as_many_parameters_as_in_its_paper(name, zero_weights):
    network, _ = getattr(zoo, name)()
    assert zoo.layers.count_params(network) == PARAMETERS[name]


def test_auxiliary_heads_have_the_parameters_of_the_reference(zero_weights):
    network, _ = zoo.googlenet()
    heads = zoo.auxiliary_heads(network)
    count = zoo.layers.count_params
    assert count([network, *heads]) - count(network) == 13_378_280 - 6_998_552  # as in Caffe's
    with pytest.raises(ValueError, match="images of at least 65 pixels"):
        zoo.auxiliary_heads(zoo.googlenet(64, width=0.05)[0])


FEWEST = {"alexnet": 67, "vgg16": 32, "googlenet": 32, "cifar10_cnn": 8, "wgan_generator": 8,
          "wgan_critic": 8, "lsgan_generator": 16, "lsgan_critic": 16}  # fmt: skip


@pytest.mark.parametrize("name", FEWEST)
def test_images_may_be_small_and_too_small_ones_are_refused(name):
    build, pixels = getattr(zoo, name), FEWEST[name]
    network, input = build(pixels, width=0.01)
    assert all(side is None or side > 0 for side in network.output_shape)
    assert input.ndim in (2, 4)
    with pytest.raises(ValueError, match=f"{name}: expected .*pixels.*, got {pixels - 1}"):
        build(pixels - 1, width=0.01)


def test_networks_take_an_expression_as_input():
    words = tt.imatrix()
    network, input = zoo.lstm(width=0.05, input=words + 1, words=50)
    assert input.owner.inputs[0] is words
    assert words in theano.gof.graph.inputs([lasagne.layers.get_output(network)])


@pytest.mark.parametrize("depth", [4, 9, 27])
def test_a_wide_resnet_of_an_impossible_depth_is_refused(depth):
    with pytest.raises(ValueError, match=f"depth: expected 10, 16, 22.*got {depth}"):
        zoo.wide_resnet(depth=depth)


class Recorded:
    """A recorder that keeps what it is told."""

    def __init__(self):
        self.modes, self.train, self.val = [], [], []

    def start(self):
        self.modes.append("start")

    def end(self, mode):
        assert self.modes[-1] == "start"
        self.modes[-1] = mode

    def train_error(self, *values):
        self.train.append(values)

    def val_error(self, *values):
        self.val.append(values)


FEW_IMAGES = {"batch_size": 16, "weight_decay": 1e-5}
#: Small models, how many steps they train, and the part of the first loss that the last ones have.
SMALL = {
    "Cifar10CNN": ({**FEW_IMAGES, "width": 0.5, "update_rule": "adam", "learning_rate": 0.01}, 25, 0.8),
    "AlexNet": ({**FEW_IMAGES, "pixels": 67, "width": 1 / 16}, 12, 0.8),
    "VGG16": ({**FEW_IMAGES, "pixels": 32, "width": 1 / 16}, 24, 0.8),
    "GoogLeNet": ({**FEW_IMAGES, "pixels": 65, "width": 1 / 16, "heads": True,
                   "update_rule": "adam", "learning_rate": 0.01}, 20, 0.9),
    "ResNet50": ({**FEW_IMAGES, "pixels": 32, "width": 1 / 16, "learning_rate": 0.05}, 8, 0.7),
    "WideResNet": ({**FEW_IMAGES, "width": 0.5, "depth": 10, "widen": 1,
                    "learning_rate": 0.05}, 10, 0.7),
    "LSTM": ({"width": 1 / 8, "batch_size": 100, "learning_rate": 0.02}, 32, 0.7),
}  # fmt: skip


#: These compile or train for long.
DEEP = {"Cifar10CNN", "GoogLeNet", "LSTM", "ResNet50", "WideResNet", "LSGAN"}


def marked(names):
    """Return the names as parameters, of which some are slow."""
    return [pytest.param(one, marks=[pytest.mark.slow] if one in DEEP else []) for one in names]


@pytest.mark.parametrize("name", marked(SMALL))
def test_a_small_model_learns_real_images(name, monkeypatch, tmp_path):
    if name == "WideResNet":
        need_keras(monkeypatch, tmp_path)
    options, steps, part = SMALL[name]
    model = getattr(zoo, name)({"rank": 0, "size": 1, "verbose": False, **options})
    model.compile_iter_fns(function=compile_fast)
    recorder = Recorded()
    before = [param.get_value() for param in model.params]
    averages = [average.get_value() for average in model.averages]
    for count in range(steps):
        cost, wrong = model.train_iter(count, recorder)
        assert np.isfinite(cost) and 0 <= wrong <= 1
    losses = [cost for _, cost, _ in recorder.train]
    assert np.mean(losses[-3:]) < part * losses[0], losses
    assert [count for count, _, _ in recorder.train] == list(range(steps))
    assert recorder.modes == ["load", "calc"] * steps
    for old, param in zip([*before, *averages], [*model.params, *model.averages]):
        assert not np.array_equal(old, param.get_value()), param.name
    cost, wrong, wrong_of_5 = model.val_iter(0, recorder)
    assert recorder.val == [(0, cost, wrong, wrong_of_5)]
    assert np.isfinite(cost) and 0 <= wrong_of_5 <= wrong <= 1


def test_the_152_layers_of_a_narrow_resnet_are_a_model(monkeypatch):
    model = zoo.ResNet152({"pixels": 32, "width": 1 / 64, "batch_size": 16})
    convolutions = [one for one in lasagne.layers.get_all_layers(model.network) if hasattr(one, "W")]
    assert len(convolutions) == 152 + 4  # 4 are on the shortcuts
    assert len(model.averages) == 3 * (len(convolutions) - 1)


ADVERSARIAL = {
    "WGAN": {"pixels": 16, "width": 1 / 16, "learning_rate": 0.001, "clip": 0.1},
    "LSGAN": {"pixels": 16, "width": 1 / 16, "learning_rate": 0.002},
}


@pytest.mark.parametrize("name", marked(ADVERSARIAL))
def test_critic_and_generator_learn_from_real_digits(name):
    kind = getattr(zoo, name)
    config = {"batch_size": 32, "noise": 10, "n_critic": 20, **ADVERSARIAL[name]}
    model = kind(config)
    model.compile_iter_fns(function=compile_fast)
    assert model.params == [*model.generator_params, *model.critic_params]
    generator = [param.get_value() for param in model.generator_params]
    losses = [model.train_iter(count)[0] for count in range(19)]
    assert np.mean(losses[-5:]) < np.mean(losses[:3])  # the critic tells them apart better
    for old, param in zip(generator, model.generator_params):
        np.testing.assert_array_equal(old, param.get_value())
    model.train_iter(19)  # the generator's turn
    assert not all(
        np.array_equal(old, param.get_value()) for old, param in zip(generator, model.generator_params)
    )
    noise = model._noise(32)
    against = [float(model.generator_iter_fn(noise)) for _ in range(15)]
    assert np.mean(against[-3:]) < against[0]  # it deceives the critic more
    if model.options["clip"]:
        largest = max(abs(param.get_value()).max() for param in model.critic_params)
        assert largest <= np.float32(model.options["clip"])
    images = model.generate(3)
    assert images.shape == (3, 1, 16, 16) and abs(images).max() <= 1
    assert len(model.val_iter(0)) == 3


def tiny(**config):
    return zoo.Cifar10CNN({"data": zoo.data.digits(), "pixels": 8, "width": 0.1, **config})


def test_models_have_the_interface_of_a_session():
    model = tiny(rank=1, size=2, batch_size=50, n_subb=2, n_epochs=3, session_key=object())
    assert (model.epoch, model.n_epochs, model.n_subb) == (0, 3, 2)
    assert model.data.n_batch_train == 1618 // (50 * 2 * 2)
    assert model.data.n_batch_val == 1
    assert all(isinstance(one, theano.compile.SharedVariable) for one in model.params)
    for name in zoo.__all__:
        value = getattr(zoo, name)
        if inspect.isclass(value):
            assert issubclass(value, zoo.Model)


def test_ranks_begin_with_equal_parameters_which_depend_on_the_seed():
    first, second, other = tiny(rank=0, size=2), tiny(rank=1, size=2), tiny(seed=1)
    for a, b in zip(first.params, second.params):
        np.testing.assert_array_equal(a.get_value(), b.get_value())
    assert not np.array_equal(first.params[0].get_value(), other.params[0].get_value())


def test_an_epoch_begins_again_and_has_another_order_than_the_one_before(monkeypatch):
    model = tiny(batch_size=400, n_subb=2)
    monkeypatch.setattr(model, "train_step", lambda rows, labels: (labels.sum(), rows.sum()))
    model.train_iter_fn = True
    first, second, again = ([model.train_iter(0) for _ in range(4)] for _ in range(3))
    assert first == second == again  # of one epoch
    model.epoch = 1
    assert model.train_iter(0) != first[0]
    model.epoch = 0
    assert model.train_iter(0) != first[0]  # the order changes at the start of an epoch only
    model.reset_iter("train")
    assert model.train_iter(0) == first[0]


def test_the_learning_rate_falls_at_its_epochs():
    model = tiny(learning_rate=0.5, lr_epochs=(2, 4), lr_factor=0.1)
    rates = []
    for epoch in range(6):
        model.adjust_hyperp(epoch)
        rates.append(float(model.shared_lr.get_value()))
    np.testing.assert_allclose(rates, [0.5, 0.5, 0.05, 0.05, 0.005, 0.005], rtol=1e-6)


def test_iterations_need_compiled_functions():
    model = tiny()
    with pytest.raises(RuntimeError, match=r"call compile_iter_fns\(\) before iterations"):
        model.train_iter(0)
    model.compile_iter_fns(function=lambda *args, **kwargs: object())
    model.cleanup()
    with pytest.raises(RuntimeError, match="compile_iter_fns"):
        model.val_iter(0)


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="config: expected 'batch_size', got 'batchsize'"):
        tiny(batchsize=3)
    with pytest.raises(ValueError, match="update_rule: expected one of sgd, .*, got 'adamw'"):
        tiny(update_rule="adamw").compile_iter_fns(function=compile_fast)
    with pytest.raises(ValueError, match="mode: expected 'train' or 'val', got 'test'"):
        tiny().reset_iter("test")


def test_errors_count_the_classes_that_are_more_probable(in_python):
    from synkhronos.extensions.zoo.model import error

    random = np.random.RandomState(2)
    values, of_rows = random.rand(40, 12).astype("float32"), random.randint(0, 12, 40).astype("int32")
    probabilities, labels = tt.fmatrix(), tt.ivector()
    measured = theano.function(
        [probabilities, labels], [error(probabilities, labels, among) for among in (1, 5)]
    )
    order = np.argsort(-values, axis=1)
    for among, got in zip((1, 5), measured(values, of_rows)):
        expected = np.mean([label not in row[:among] for row, label in zip(order, of_rows)])
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_weight_decay_adds_half_the_sum_of_squares_of_the_weights(in_python):
    costs = {}
    for decay in (0.0, 0.5):
        model = tiny(update_rule="sgd", learning_rate=1.0, weight_decay=decay, seed=4)
        weights = model._graph.decayed
        assert {param.name for param in weights} == {"W"}
        before = [param.get_value() for param in model.params]
        model.compile_iter_fns(function=compile_fast)
        model.train_iter(0)
        costs[decay] = [param.get_value() - old for old, param in zip(before, model.params)]
    for old, param, plain, decayed in zip(before, model.params, costs[0.0], costs[0.5]):
        expected = plain - (0.5 * old if param.name == "W" else 0)
        np.testing.assert_allclose(decayed, expected, rtol=1e-3, atol=1e-5)
