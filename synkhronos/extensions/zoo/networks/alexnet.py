"""AlexNet, the network that won ImageNet's challenge of 2012."""

from __future__ import annotations

from typing import Any

import lasagne
from lasagne.layers import DropoutLayer, LocalResponseNormalization2DLayer, MaxPool2DLayer

from synkhronos.extensions.zoo import data
from synkhronos.extensions.zoo.layers import ConvLayer, Layer, scaled
from synkhronos.extensions.zoo.model import Model
from synkhronos.extensions.zoo.networks._inputs import image_input

_rectify, _softmax = lasagne.nonlinearities.rectify, lasagne.nonlinearities.softmax


def alexnet(
    pixels: int = 227,
    classes: int = 1000,
    width: float = 1.0,
    channels: int = 3,
    input: Any = None,
) -> tuple[Layer, Any]:
    """Return the network of Krizhevsky et al. (2012), and its input.

    Five convolutions, of which the second, fourth and fifth have two groups, as in the paper, which
    trained one group on each of two GPUs; and three fully connected layers. 60,965,224 parameters; the
    paper says 60 million. The weights begin with a normal distribution with the paper's deviation,
    0.01, divided by the square root of `width`, which keeps the variance of the outputs.

    A. Krizhevsky, I. Sutskever and G. Hinton, "ImageNet Classification with Deep Convolutional Neural
    Networks", NIPS 2012.

    Parameters
    ----------
    pixels : int
        Height and width of an image, at least 67. The paper's 224 do not fit its own sizes; with 227
        they do.
    classes : int
        The number of outputs, which are probabilities.
    width : float
        A factor for the number of filters and of hidden units.
    channels : int
        The number of colors: 3, or 1 for gray.
    input : float tensor of 4 dimensions, optional
        An expression to be used as input; by default a new variable.

    Returns
    -------
    network : lasagne.layers.Layer
        The output layer.
    input : variable
        Images: rows, channels, height, width.
    """
    weights = lasagne.init.Normal(0.01 / width**0.5)

    def conv(layer: Layer, filters: int, size: int, bias: int, **options: int) -> Layer:
        filters = scaled(filters, width, multiple=2)
        initial = {"W": weights, "b": lasagne.init.Constant(bias)}
        return ConvLayer(layer, filters, size, nonlinearity=_rectify, **initial, **options)

    layer, input = image_input("alexnet", pixels, channels, input, at_least=67)
    layer = LocalResponseNormalization2DLayer(conv(layer, 96, 11, 0, stride=4, pad=0))
    layer = MaxPool2DLayer(layer, 3, stride=2)
    layer = LocalResponseNormalization2DLayer(conv(layer, 256, 5, 1, groups=2))
    layer = MaxPool2DLayer(layer, 3, stride=2)
    layer = conv(layer, 384, 3, 0)
    layer = conv(layer, 384, 3, 1, groups=2)
    layer = MaxPool2DLayer(conv(layer, 256, 3, 1, groups=2), 3, stride=2)
    for _ in range(2):
        units, bias = scaled(4096, width), lasagne.init.Constant(1)
        layer = lasagne.layers.DenseLayer(layer, units, W=weights, b=bias, nonlinearity=_rectify)
        layer = DropoutLayer(layer, 0.5)
    return lasagne.layers.DenseLayer(layer, classes, W=weights, nonlinearity=_softmax), input


class AlexNet(Model):
    """AlexNet with the paper's training: momentum 0.9, weight decay 0.0005, minibatches of 128."""

    defaults = {
        **Model.defaults,
        "pixels": 227,
        "batch_size": 128,
        "n_epochs": 90,
        "learning_rate": 0.01,
        "lr_epochs": (30, 60, 80),  # the paper: three times, when the validation error stopped improving
        "weight_decay": 5e-4,
    }
    network = staticmethod(alexnet)
    read = staticmethod(data.imagenet)
