"""Well-known networks, each from its paper, and models that train them on real data.

``networks``
    The networks and their models, one family in a module.
``model``
    What all models have in common: data, loss, updates, iterations.
``minibatches``
    The minibatches of one rank.
``data``
    Readers of real data.
``texts``
    Reviews from text files, as numbers of words.
``layers``
    Batch normalization, transposed convolutions and others that Lasagne 0.1 does not have.

A network is a function, which returns its output layer and its input, and is usable by itself::

    network, images = zoo.alexnet(pixels=227, classes=1000, width=1.0)

A model is a class, whose objects train a network on one rank, by iterations::

    model = zoo.AlexNet({"rank": 0, "size": 1, "pixels": 67, "width": 0.1, "batch_size": 8})

Each name is imported when it is first used, so Lasagne is needed for the networks only, and Keras for
``wide_resnet`` only.
"""

import importlib as _importlib
import typing as _typing

#: The modules, and the public names with the modules that define them.
_MODULES = ("data", "layers", "minibatches", "model", "texts")
_NAMES = {
    "AlexNet": "networks.alexnet",
    "Cifar10CNN": "networks.cifar10_cnn",
    "GoogLeNet": "networks.googlenet",
    "LSGAN": "networks.gan",
    "LSTM": "networks.lstm",
    "Model": "model",
    "ResNet152": "networks.resnet",
    "ResNet50": "networks.resnet",
    "VGG16": "networks.vgg",
    "WGAN": "networks.gan",
    "WideResNet": "networks.wide_resnet",
    "alexnet": "networks.alexnet",
    "auxiliary_heads": "networks.googlenet",
    "cifar10_cnn": "networks.cifar10_cnn",
    "googlenet": "networks.googlenet",
    "lsgan_critic": "networks.gan",
    "lsgan_generator": "networks.gan",
    "lstm": "networks.lstm",
    "resnet": "networks.resnet",
    "resnet152": "networks.resnet",
    "resnet50": "networks.resnet",
    "vgg16": "networks.vgg",
    "wgan_critic": "networks.gan",
    "wgan_generator": "networks.gan",
    "wide_resnet": "networks.wide_resnet",
}
__all__ = sorted(_NAMES)

if _typing.TYPE_CHECKING:
    from synkhronos.extensions.zoo import data as data
    from synkhronos.extensions.zoo import layers as layers
    from synkhronos.extensions.zoo import minibatches as minibatches
    from synkhronos.extensions.zoo import model as model
    from synkhronos.extensions.zoo import texts as texts
    from synkhronos.extensions.zoo.model import Model as Model
    from synkhronos.extensions.zoo.networks.alexnet import AlexNet as AlexNet
    from synkhronos.extensions.zoo.networks.alexnet import alexnet as alexnet
    from synkhronos.extensions.zoo.networks.cifar10_cnn import Cifar10CNN as Cifar10CNN
    from synkhronos.extensions.zoo.networks.cifar10_cnn import cifar10_cnn as cifar10_cnn
    from synkhronos.extensions.zoo.networks.gan import LSGAN as LSGAN
    from synkhronos.extensions.zoo.networks.gan import WGAN as WGAN
    from synkhronos.extensions.zoo.networks.gan import lsgan_critic as lsgan_critic
    from synkhronos.extensions.zoo.networks.gan import lsgan_generator as lsgan_generator
    from synkhronos.extensions.zoo.networks.gan import wgan_critic as wgan_critic
    from synkhronos.extensions.zoo.networks.gan import wgan_generator as wgan_generator
    from synkhronos.extensions.zoo.networks.googlenet import GoogLeNet as GoogLeNet
    from synkhronos.extensions.zoo.networks.googlenet import auxiliary_heads as auxiliary_heads
    from synkhronos.extensions.zoo.networks.googlenet import googlenet as googlenet
    from synkhronos.extensions.zoo.networks.lstm import LSTM as LSTM
    from synkhronos.extensions.zoo.networks.lstm import lstm as lstm
    from synkhronos.extensions.zoo.networks.resnet import ResNet50 as ResNet50
    from synkhronos.extensions.zoo.networks.resnet import ResNet152 as ResNet152
    from synkhronos.extensions.zoo.networks.resnet import resnet as resnet
    from synkhronos.extensions.zoo.networks.resnet import resnet50 as resnet50
    from synkhronos.extensions.zoo.networks.resnet import resnet152 as resnet152
    from synkhronos.extensions.zoo.networks.vgg import VGG16 as VGG16
    from synkhronos.extensions.zoo.networks.vgg import vgg16 as vgg16
    from synkhronos.extensions.zoo.networks.wide_resnet import WideResNet as WideResNet
    from synkhronos.extensions.zoo.networks.wide_resnet import wide_resnet as wide_resnet
else:

    def __getattr__(name: str) -> _typing.Any:
        if name in _MODULES:
            return _importlib.import_module(f"{__name__}.{name}")
        if name not in _NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)


def __dir__() -> _typing.List[str]:
    return sorted([*_MODULES, *_NAMES])
