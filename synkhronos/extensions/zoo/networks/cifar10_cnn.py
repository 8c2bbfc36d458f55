"""A small convolutional network for CIFAR-10."""

from __future__ import annotations

from typing import Any

import lasagne
from lasagne.layers import DenseLayer, LocalResponseNormalization2DLayer

from synkhronos.extensions.zoo import data
from synkhronos.extensions.zoo.layers import ConvLayer, Layer, rectified, scaled
from synkhronos.extensions.zoo.model import Model
from synkhronos.extensions.zoo.networks._inputs import average_pool, image_input, same_pool


def cifar10_cnn(
    pixels: int = 32,
    classes: int = 10,
    width: float = 1.0,
    channels: int = 3,
    input: Any = None,
) -> tuple[Layer, Any]:
    """Return the network of cuda-convnet for CIFAR-10, with an error of 18%, and its input.

    Three convolutions of 5x5, one maximum pooling and two average poolings. 89,578 parameters, as in
    Caffe's ``cifar10_full``, which has this network. Responses are normalized across channels, as in
    AlexNet, instead of over positions.

    A. Krizhevsky, "cuda-convnet", ``layers-18pct.cfg``, 2011,
    https://code.google.com/archive/p/cuda-convnet/.

    Parameters
    ----------
    pixels : int
        Height and width of an image, at least 8.
    classes, width, channels, input
        As for :func:`~synkhronos.extensions.zoo.networks.alexnet.alexnet`.

    Returns
    -------
    network : lasagne.layers.Layer
        The output layer.
    input : variable
        Images: rows, channels, height, width.
    """

    def conv(layer: Layer, filters: int, deviation: float) -> Layer:
        # As in alexnet(), outputs have the same variance at every width.
        weights = lasagne.init.Normal(deviation / width**0.5)
        return ConvLayer(layer, scaled(filters, width), 5, W=weights, b=lasagne.init.Constant(0))

    layer, input = image_input("cifar10_cnn", pixels, channels, input, at_least=8)
    # The original has 0.0001 for pixels with a deviation of about 64, which is 1 here.
    layer = rectified(same_pool(conv(layer, 32, 0.0064 * width**0.5)))
    layer = LocalResponseNormalization2DLayer(layer, alpha=5e-5, k=1, n=3)
    layer = average_pool(rectified(conv(layer, 32, 0.01)))
    layer = LocalResponseNormalization2DLayer(layer, alpha=5e-5, k=1, n=3)
    layer = average_pool(rectified(conv(layer, 64, 0.01)))
    weights = lasagne.init.Normal(0.01 / width**0.5)
    return DenseLayer(layer, classes, W=weights, nonlinearity=lasagne.nonlinearities.softmax), input


class Cifar10CNN(Model):
    """The network of cuda-convnet with its training: momentum 0.9, rate 0.001, minibatches of 100."""

    defaults = {
        **Model.defaults,
        "pixels": 32,
        "batch_size": 100,
        "n_epochs": 140,
        "learning_rate": 0.001,
        "lr_epochs": (120, 130),
        "weight_decay": 0.004,
    }
    network = staticmethod(cifar10_cnn)
    read = staticmethod(data.cifar10)
