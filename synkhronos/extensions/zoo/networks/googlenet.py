"""GoogLeNet, the network that won ImageNet's challenge of 2014."""

from __future__ import annotations

from typing import Any, Sequence

import lasagne
from lasagne.layers import (
    ConcatLayer,
    DenseLayer,
    DropoutLayer,
    GlobalPoolLayer,
    LocalResponseNormalization2DLayer,
    MaxPool2DLayer,
    Pool2DLayer,
)

from synkhronos.extensions.zoo import data
from synkhronos.extensions.zoo.layers import ConvLayer, Layer, scaled
from synkhronos.extensions.zoo.model import Head, Model
from synkhronos.extensions.zoo.networks._inputs import image_input, same_pool

_rectify, _softmax = lasagne.nonlinearities.rectify, lasagne.nonlinearities.softmax

#: The paper's table 1, by stage: filters of 1x1; of 1x1 before 3x3, and of 3x3; of 1x1 before 5x5, and
#: of 5x5; and of 1x1 after the pooling.
_MODULES = {
    "3": {"a": (64, 96, 128, 16, 32, 32), "b": (128, 128, 192, 32, 96, 64)},
    "4": {
        "a": (192, 96, 208, 16, 48, 64),
        "b": (160, 112, 224, 24, 64, 64),
        "c": (128, 128, 256, 24, 64, 64),
        "d": (112, 144, 288, 32, 64, 64),
        "e": (256, 160, 320, 32, 128, 128),
    },
    "5": {"a": (256, 160, 320, 32, 128, 128), "b": (384, 192, 384, 48, 128, 128)},
}
_WITH_HEADS = ("inception_4a", "inception_4d")


def googlenet(
    pixels: int = 224,
    classes: int = 1000,
    width: float = 1.0,
    channels: int = 3,
    input: Any = None,
) -> tuple[Layer, Any]:
    """Return the network of Szegedy et al. (2015), without auxiliary classifiers, and its input.

    22 layers with parameters, in nine Inception modules. 6,998,552 parameters, with biases: the network
    of the paper's table 1 as Caffe's model ``bvlc_googlenet`` has it. (The table's own column adds up to
    about 6.8 million.) The two auxiliary classifiers are built by :func:`auxiliary_heads`.

    C. Szegedy et al., "Going Deeper with Convolutions", CVPR 2015 (arXiv:1409.4842).

    Parameters
    ----------
    pixels : int
        Height and width of an image, at least 32.
    classes, width, channels, input
        As for :func:`~synkhronos.extensions.zoo.networks.alexnet.alexnet`.

    Returns
    -------
    network : lasagne.layers.Layer
        The output layer. The layers of the Inception modules' outputs have names: ``inception_3a`` to
        ``inception_5b``.
    input : variable
        Images: rows, channels, height, width.
    """
    layer, input = image_input("googlenet", pixels, channels, input, at_least=32)
    layer = same_pool(_conv(layer, scaled(64, width), 7, stride=2))
    layer = _conv(LocalResponseNormalization2DLayer(layer), scaled(64, width), 1)
    layer = LocalResponseNormalization2DLayer(_conv(layer, scaled(192, width), 3))
    for stage, modules in _MODULES.items():
        layer = same_pool(layer)
        for letter, filters in modules.items():
            numbers = [scaled(number, width) for number in filters]
            layer = _inception(layer, numbers, f"inception_{stage}{letter}")
    layer = DropoutLayer(GlobalPoolLayer(layer), 0.4)
    weights = lasagne.init.GlorotUniform()
    return DenseLayer(layer, classes, W=weights, nonlinearity=_softmax), input


def auxiliary_heads(network: Layer, classes: int = 1000, width: float = 1.0) -> list[Layer]:
    """Return the two auxiliary classifiers of GoogLeNet, which are only used for training.

    They see the outputs of the modules 4a and 4d. Their losses count 0.3 in the loss of the whole.
    6,379,728 parameters at full width and 224 pixels.

    Parameters
    ----------
    network : lasagne.layers.Layer
        From :func:`googlenet`, for at least 65 pixels.
    classes, width
        As given to :func:`googlenet`.

    Returns
    -------
    list of lasagne.layers.Layer
        The output layer of each.

    Raises
    ------
    ValueError
        If the images are too small for the pooling of 5x5.
    """
    heads = []
    for layer in lasagne.layers.get_all_layers(network):
        if layer.name in _WITH_HEADS:
            if layer.output_shape[2] < 5:
                raise ValueError(
                    f"auxiliary_heads: expected images of at least 65 pixels, which leave 5 of "
                    f"{layer.name}, got {layer.output_shape[2]} there"
                )
            head = Pool2DLayer(layer, 5, stride=3, mode="average_exc_pad")
            head = _conv(head, scaled(128, width), 1)
            head = DenseLayer(head, scaled(1024, width), nonlinearity=_rectify)
            heads.append(DenseLayer(DropoutLayer(head, 0.7), classes, nonlinearity=_softmax))
    return heads


def _conv(layer: Layer, filters: int, size: int, stride: int = 1) -> Layer:
    bias = lasagne.init.Constant(0.2)
    return ConvLayer(layer, filters, size, stride, b=bias, nonlinearity=_rectify)


def _inception(layer: Layer, filters: Sequence[int], name: str) -> Layer:
    direct, reduced_3, filters_3, reduced_5, filters_5, pooled = filters
    branches = [
        _conv(layer, direct, 1),
        _conv(_conv(layer, reduced_3, 1), filters_3, 3),
        _conv(_conv(layer, reduced_5, 1), filters_5, 5),
        _conv(MaxPool2DLayer(layer, 3, stride=1, pad=1), pooled, 1),
    ]
    return ConcatLayer(branches, name=name)


class GoogLeNet(Model):
    """GoogLeNet, with the paper's momentum of 0.9 and a rate that falls by 4% every 8 epochs.

    With ``heads=True``, which needs 65 pixels, the auxiliary classifiers are trained, too.
    """

    defaults = {
        **Model.defaults,
        "pixels": 224,
        "batch_size": 32,
        "n_epochs": 60,
        "learning_rate": 0.01,
        "lr_epochs": tuple(range(8, 60, 8)),
        "lr_factor": 0.96,
        "weight_decay": 2e-4,
        "heads": False,
    }
    network = staticmethod(googlenet)
    read = staticmethod(data.imagenet)

    def heads_of(self, network: Layer) -> list[Head]:
        if not self.options["heads"]:
            return []
        built = auxiliary_heads(network, self.options["classes"], self.options["width"])
        return [Head(layer, 0.3) for layer in built]
