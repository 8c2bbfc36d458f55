"""VGG16, the network of the University of Oxford for ImageNet's challenge of 2014."""

from __future__ import annotations

from typing import Any

import lasagne
from lasagne.layers import DenseLayer, DropoutLayer, MaxPool2DLayer

from synkhronos.extensions.zoo import data
from synkhronos.extensions.zoo.layers import ConvLayer, Layer, scaled
from synkhronos.extensions.zoo.model import Model
from synkhronos.extensions.zoo.networks._inputs import image_input

_rectify = lasagne.nonlinearities.rectify

#: Configuration D of the paper's table 1: how many convolutions of how many filters a stage has.
_STAGES = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))


def vgg16(
    pixels: int = 224,
    classes: int = 1000,
    width: float = 1.0,
    channels: int = 3,
    input: Any = None,
) -> tuple[Layer, Any]:
    """Return configuration D of Simonyan and Zisserman (2015), and its input.

    Thirteen convolutions of 3x3, and three fully connected layers. 138,357,544 parameters; the paper's
    table 2 says 138 million. The weights begin as X. Glorot and Y. Bengio (2010) propose, which the
    paper found to work without training a smaller network first.

    K. Simonyan and A. Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
    ICLR 2015 (arXiv:1409.1556).

    Parameters
    ----------
    pixels : int
        Height and width of an image, at least 32.
    classes, width, channels, input
        As for :func:`~synkhronos.extensions.zoo.networks.alexnet.alexnet`.

    Returns
    -------
    network : lasagne.layers.Layer
        The output layer.
    input : variable
        Images: rows, channels, height, width.
    """
    weights, bias = lasagne.init.GlorotUniform(gain="relu"), lasagne.init.Constant(0)
    layer, input = image_input("vgg16", pixels, channels, input, at_least=32)
    for length, filters in _STAGES:
        for _ in range(length):
            layer = ConvLayer(layer, scaled(filters, width), 3, W=weights, b=bias, nonlinearity=_rectify)
        layer = MaxPool2DLayer(layer, 2)
    for _ in range(2):
        layer = DenseLayer(layer, scaled(4096, width), W=weights, nonlinearity=_rectify)
        layer = DropoutLayer(layer, 0.5)
    return DenseLayer(layer, classes, nonlinearity=lasagne.nonlinearities.softmax), input


class VGG16(Model):
    """VGG16 with the paper's training: momentum 0.9, weight decay 0.0005, minibatches of 256."""

    defaults = {
        **Model.defaults,
        "pixels": 224,
        "batch_size": 256,
        "n_epochs": 74,
        "learning_rate": 0.01,
        "lr_epochs": (20, 40, 60),  # the paper: three times in 74 epochs
        "weight_decay": 5e-4,
    }
    network = staticmethod(vgg16)
    read = staticmethod(data.imagenet)
