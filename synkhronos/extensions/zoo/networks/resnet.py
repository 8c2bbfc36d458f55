"""Residual networks for ImageNet, with 50 and 152 layers."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import lasagne
from lasagne.layers import DenseLayer, ElemwiseSumLayer, GlobalPoolLayer

from synkhronos.extensions.zoo import data
from synkhronos.extensions.zoo.layers import BatchNormLayer, ConvLayer, Layer, rectified, scaled
from synkhronos.extensions.zoo.model import Model
from synkhronos.extensions.zoo.networks._inputs import image_input, same_pool


def resnet(
    pixels: int = 224,
    classes: int = 1000,
    width: float = 1.0,
    channels: int = 3,
    input: Any = None,
    blocks: Sequence[int] = (3, 4, 6, 3),
    norm: Callable[[Layer], Layer] = BatchNormLayer,
) -> tuple[Layer, Any]:
    """Return a residual network of bottlenecks, and its input.

    A stage has half the resolution and twice the width of the stage before. The first convolution of a
    stage has the stride, as in the paper.

    K. He, X. Zhang, S. Ren and J. Sun, "Deep Residual Learning for Image Recognition", CVPR 2016
    (arXiv:1512.03385).

    Parameters
    ----------
    pixels : int
        Height and width of an image, at least 1.
    classes, width, channels, input
        As for :func:`~synkhronos.extensions.zoo.networks.alexnet.alexnet`.
    blocks : sequence of int
        The number of bottlenecks of each stage: the network has ``2 + 3 * sum(blocks)`` layers.
    norm : callable
        ``norm(layer)`` adds a batch normalization.

    Returns
    -------
    network : lasagne.layers.Layer
        The output layer.
    input : variable
        Images: rows, channels, height, width.
    """
    filters = scaled(64, width)
    layer, input = image_input("resnet", pixels, channels, input)
    layer = same_pool(rectified(norm(ConvLayer(layer, filters, 7, stride=2))))
    for stage, length in enumerate(blocks):
        for block in range(length):
            stride = 2 if stage > 0 and block == 0 else 1
            layer = bottleneck(layer, filters * 2**stage, stride, norm)
    layer = GlobalPoolLayer(layer)
    return DenseLayer(layer, classes, nonlinearity=lasagne.nonlinearities.softmax), input


def bottleneck(
    layer: Layer, width: int, stride: int, norm: Callable[[Layer], Layer] = BatchNormLayer
) -> Layer:
    """Return convolutions of 1x1 to `width` channels, 3x3, and 1x1 to ``4 * width``, plus the input."""
    residual = rectified(norm(ConvLayer(layer, width, 1, stride)))
    residual = rectified(norm(ConvLayer(residual, width, 3)))
    residual = norm(ConvLayer(residual, 4 * width, 1))
    if layer.output_shape != residual.output_shape:
        layer = norm(ConvLayer(layer, 4 * width, 1, stride))
    return rectified(ElemwiseSumLayer([layer, residual]))


def resnet50(
    pixels: int = 224,
    classes: int = 1000,
    width: float = 1.0,
    channels: int = 3,
    input: Any = None,
    norm: Callable[[Layer], Layer] = BatchNormLayer,
) -> tuple[Layer, Any]:
    """Return the :func:`resnet` with 50 layers, and its input.

    25,557,032 trainable parameters: with the scale and the shift of each batch normalization, and
    without its running averages.
    """
    return resnet(pixels, classes, width, channels, input, (3, 4, 6, 3), norm)


def resnet152(
    pixels: int = 224,
    classes: int = 1000,
    width: float = 1.0,
    channels: int = 3,
    input: Any = None,
    norm: Callable[[Layer], Layer] = BatchNormLayer,
) -> tuple[Layer, Any]:
    """Return the :func:`resnet` with 152 layers, and its input.

    60,192,808 trainable parameters: with the scale and the shift of each batch normalization, and
    without its running averages.
    """
    return resnet(pixels, classes, width, channels, input, (3, 8, 36, 3), norm)


class ResNet50(Model):
    """ResNet-50 with the paper's training: momentum 0.9, weight decay 0.0001, minibatches of 256."""

    defaults = {
        **Model.defaults,
        "pixels": 224,
        "batch_size": 256,
        "n_epochs": 120,  # the paper: 600,000 minibatches
        "learning_rate": 0.1,
        "lr_epochs": (30, 60, 90),  # the paper: when the error stops falling
        "weight_decay": 1e-4,
    }
    network = staticmethod(resnet50)
    read = staticmethod(data.imagenet)


class ResNet152(ResNet50):
    """ResNet-152, with the training of :class:`ResNet50`."""

    network = staticmethod(resnet152)
