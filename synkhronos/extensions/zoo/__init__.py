"""Well-known networks, each from its paper, and models that train them on real data.

``networks``, ``gan``, ``keras_networks``
    The networks and their models.
``model``
    What all models have in common: data, loss, updates, iterations.
``data``
    Readers of real data, and the minibatches of one rank.
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

#: The modules, and the public names that some of them define.
_MODULES = ("data", "layers", "model", "texts")
_NAMES = {
    "gan": ("LSGAN", "WGAN", "lsgan_critic", "lsgan_generator", "wgan_critic", "wgan_generator"),
    "model": ("Model",),
    "networks": (
        "AlexNet", "Cifar10CNN", "GoogLeNet", "LSTM", "ResNet152", "ResNet50", "VGG16", "alexnet",
        "auxiliary_heads", "cifar10_cnn", "googlenet", "lstm", "resnet", "resnet152", "resnet50",
        "vgg16",
    ),
    "keras_networks": ("WideResNet", "wide_resnet"),
}  # fmt: skip
_PLACES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_PLACES)

if _typing.TYPE_CHECKING:
    from synkhronos.extensions.zoo import data as data
    from synkhronos.extensions.zoo import layers as layers
    from synkhronos.extensions.zoo import model as model
    from synkhronos.extensions.zoo import texts as texts
    from synkhronos.extensions.zoo.gan import *  # noqa: F403
    from synkhronos.extensions.zoo.keras_networks import *  # noqa: F403
    from synkhronos.extensions.zoo.networks import *  # noqa: F403
else:

    def __getattr__(name: str) -> _typing.Any:
        if name in _PLACES:
            return getattr(_importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
        if name in _MODULES:
            return _importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> _typing.List[str]:
    return sorted([*_MODULES, *_PLACES])
